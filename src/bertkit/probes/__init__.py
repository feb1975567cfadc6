"""Probes: what a trained model knows, read from its outputs, its states or its attention; one file per analysis."""
