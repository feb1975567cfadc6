"""Readable pages about runs: `bertkit report`."""
