"""One file per family with its oracle."""
