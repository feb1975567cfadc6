"""Compiled loops for training on a CPU, each of which replaces several torch operators."""
