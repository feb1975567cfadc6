"""Freeing disk space: deleting whole runs, or the checkpoints of finished ones.

Not from a paper. A run that a running process is writing is never touched: its lock is taken first. Links are removed,
never followed. Imports neither torch, pydantic nor yaml.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from datetime import datetime

from bertkit.errors import DataError
from bertkit.run.directory import FREED, RunDirectory, write_record
from bertkit.run.lock import RunLock

_DAY = 86_400


def is_older(run: RunDirectory, days: float | None) -> bool:
    """Whether a run ended (or, if it did not end, started) at least this many days ago; True if `days` is None."""
    if days is None:
        return True
    ended = datetime.fromisoformat(str(run.record.get("ended") or run.record["started"]))
    return time.time() - ended.timestamp() >= days * _DAY


def delete_run(run: RunDirectory) -> None:
    """Delete the directory of a run.

    Raises:
        UsageError: a process is writing the run.
        DataError: the directory is a link.
    """
    if run.path.is_symlink():
        raise DataError(f"{run.path}: is a link to {run.path.resolve()}; delete the link yourself")
    lock = RunLock(run.path)
    try:
        shutil.rmtree(run.path)
    finally:
        lock.release()


def free_parts(run: RunDirectory, names: Sequence[str]) -> None:
    """Delete directories of a finished run that are no longer needed, and record this for `runs verify`.

    Raises:
        UsageError: a process is writing the run.
    """
    lock = RunLock(run.path)
    try:
        write_record(run.path, {**run.record, FREED: sorted({*run.record.get(FREED, ()), *names})})
        for name in names:
            shutil.rmtree(run.path / name, ignore_errors=True)
    finally:
        lock.release()


def delete_checkpoints(run: RunDirectory) -> None:
    """Delete the checkpoints of a finished run.

    Raises:
        UsageError: a process is writing the run.
    """
    lock = RunLock(run.path)
    try:
        if run.checkpoints.is_symlink():
            run.checkpoints.unlink()
        elif run.checkpoints.is_dir():
            shutil.rmtree(run.checkpoints)
    finally:
        lock.release()
