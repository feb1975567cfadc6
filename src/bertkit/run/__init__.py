"""The run directory: what a run writes, and how it is read back and checked."""
