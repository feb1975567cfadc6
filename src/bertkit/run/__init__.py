"""The run directory: what a run writes, and how it is read back and checked."""

NEWEST = "newest"
"""In place of a run's name: the newest unfinished run of the recipe; a bare `--resume`."""
