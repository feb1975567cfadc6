"""Pretraining, from a command line to a finished run, and what shows it beforehand: its plan and its batches."""
