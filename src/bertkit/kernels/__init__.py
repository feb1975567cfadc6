"""Compiled loops for training on a processor, each in place of several operators of torch."""
