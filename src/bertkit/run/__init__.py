"""The run directory: what a run writes, and how it is read back and checked."""

NEWEST = "newest"
"""Used instead of a run's name: the newest unfinished run of the recipe (`--resume` without a value)."""
