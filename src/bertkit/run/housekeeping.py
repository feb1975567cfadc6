"""Freeing disk space: deleting whole runs, or the checkpoints of finished ones.

Not from a paper. A run that a running process is writing is never touched: its lock is taken first. Links are removed,
never followed. Imports neither torch, pydantic nor yaml.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from bertkit.errors import DataError, UsageError
from bertkit.run.checkpoint_removal import remove_checkpoints
from bertkit.run.directory import FREED, RunDirectory, write_record
from bertkit.run.lock import RunLock
from bertkit.run.seal import runs_within

SECONDS_PER_DAY = 86_400

log = logging.getLogger(__name__)


def is_older(run: RunDirectory, days: float | None) -> bool:
    """Whether a run ended (or, if it did not end, started) at least this many days ago; True if `days` is None."""
    if days is None:
        return True
    ended = datetime.fromisoformat(str(run.record.get("ended") or run.record["started"]))
    return time.time() - ended.timestamp() >= days * SECONDS_PER_DAY


def runs_below(path: Path) -> Iterator[RunDirectory]:
    """The runs in the directory of a run, at any depth; those with a damaged record are skipped with a warning."""
    for inner in runs_within(path):
        try:
            yield RunDirectory.open(inner)
        except DataError as error:
            log.warning("%s", error)
        yield from runs_below(inner)


def require_unneeded(runs: Sequence[RunDirectory], others: Iterable[RunDirectory]) -> None:
    """Check that the model of no other run is a link into one of these runs, as that of a suite can be.

    Raises:
        UsageError: there is such a run.
    """
    places = [run.path.resolve() for run in runs]
    for other in others:
        if not other.model.is_symlink() or any(other.path.resolve().is_relative_to(place) for place in places):
            continue
        needed = next((place for place in places if other.model.resolve().is_relative_to(place)), None)
        if needed is not None:
            raise UsageError(
                f"{needed}: contains the model of {other.path}, which links to it; keep it, or delete {other.path}, too"
            )


def delete_run(run: RunDirectory) -> None:
    """Delete the directory of a run, with the runs in it.

    Raises:
        UsageError: a process is writing the run, or one in it.
        DataError: the directory is a link.
    """
    if run.path.is_symlink():
        raise DataError(f"{run.path}: is a link to {run.path.resolve()}; delete the link yourself")
    lock = RunLock(run.path)
    try:
        for inner in runs_below(run.path):
            RunLock(inner.path).release()
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
        OSError: they cannot be deleted.
    """
    lock = RunLock(run.path)
    try:
        remove_checkpoints(run.checkpoints)
    finally:
        lock.release()
