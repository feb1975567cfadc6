"""Freeing the disk that runs take: a run whole, or the checkpoints of a finished one.

Own design. A run that a living process writes is never touched: both take its lock first. Links are removed, never
followed. Imports neither torch, pydantic nor yaml.
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
    """Whether a run ended (or else started) this many days ago; always where `days` is None."""
    if days is None:
        return True
    ended = datetime.fromisoformat(str(run.record.get("ended") or run.record["started"]))
    return time.time() - ended.timestamp() >= days * _DAY


def delete_run(run: RunDirectory) -> None:
    """Delete the directory of a run.

    Raises:
        UsageError: a process is writing it.
        DataError: it is a link.
    """
    if run.path.is_symlink():
        raise DataError(f"{run.path}: is a link to {run.path.resolve()}; delete the link yourself")
    lock = RunLock(run.path)
    try:
        shutil.rmtree(run.path)
    finally:
        lock.release()


def free_parts(run: RunDirectory, names: Sequence[str]) -> None:
    """Delete directories of a finished run that nobody wants kept, and record it, so that `runs verify` misses none.

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
