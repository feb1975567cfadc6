"""bertkit: train, evaluate and probe the BERT family from the command line."""

__version__ = "0.1.0"
