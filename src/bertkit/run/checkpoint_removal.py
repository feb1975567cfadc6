"""Removing the checkpoints of a run so that a kill leaves none of them, rather than some that look damaged.

Not from a paper. They are moved to a hidden directory before they are deleted. Sibling checkpoint.py writes and reads
them, with torch; this file imports only the standard library, so that listing and freeing runs is fast.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from bertkit.files import bytes_in

log = logging.getLogger(__name__)


def checkpoint_bytes(checkpoints: Path) -> int:
    """The size of a run's checkpoints, also of those that a killed process did not delete completely."""
    return bytes_in(checkpoints) + bytes_in(_doomed(checkpoints))


def remove_checkpoints(checkpoints: Path) -> None:
    """Delete the checkpoints of a run whose lock the caller holds.

    Raises:
        OSError: they cannot be deleted.
    """
    doomed = _doomed(checkpoints)
    if doomed.is_dir():  # left by a kill
        shutil.rmtree(doomed)
    if checkpoints.is_symlink():
        checkpoints.unlink()
    elif checkpoints.is_dir():
        checkpoints.rename(doomed)
        shutil.rmtree(doomed)


def drop_checkpoints(checkpoints: Path) -> None:
    """The same at the end of a run, which a disk that refuses does not make fail; a warning is logged."""
    try:
        remove_checkpoints(checkpoints)
    except OSError as error:
        log.warning("the checkpoints in %s could not be removed (%s)", checkpoints, error)


def _doomed(checkpoints: Path) -> Path:
    return checkpoints.with_name(f".{checkpoints.name}.deleting")
