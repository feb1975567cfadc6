"""The run directory: what a run writes, and how it is read back and checked."""

import os
from pathlib import Path

NEWEST = "newest"
"""Used instead of a run's name: the newest unfinished run of the recipe (`--resume` without a value)."""
UPLOADED = "uploaded.json"
"""The file next to the working copy of a run on a store that lists what is there (uploading.py)."""


def runs_root() -> Path:
    """The directory of the runs: BERTKIT_RUNS, else `runs`."""
    return Path(os.environ.get("BERTKIT_RUNS") or "runs").expanduser()
