"""A run that continues in another directory, as when its disk is full.

Own design. The copy is made in a temporary directory and renamed, so that it is complete or absent; the original
run stays unchanged. Imports neither torch, pydantic nor yaml.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from bertkit.errors import DataError, UsageError
from bertkit.run.directory import RECORD, RunDirectory, write_record
from bertkit.run.lock import LOCK_FILE, RunLock
from bertkit.run.seal import runs_within

_PARTIAL = shutil.ignore_patterns(LOCK_FILE, "*.writing", ".writing-*", "*.tmp")
_TRAINING = ("finetune", "distill", "pretrain")
"""A suite of these finds its runs in its own directory."""

log = logging.getLogger(__name__)


def continued_in(run: RunDirectory, directory: Path | None) -> RunDirectory:
    """The run itself, or a copy of it in another directory.

    Args:
        run: to resume.
        directory: where it continues; None, or its own: where it is. A copy that was made earlier is taken as it is.

    Raises:
        UsageError: a process is writing the run, it is a study or evaluation with runs of its own, or the directory
            holds something else.
        DataError: the copy cannot be written.
    """
    if directory is None or directory.resolve() == run.path.resolve():
        return run
    if (directory / RECORD).is_file():
        return _same_run(run, directory)
    if run.record["kind"] not in _TRAINING and any(runs_within(run.path)):
        raise UsageError(
            f"--run-dir {directory}: {run.path} has runs of its own, whose places it has recorded; it cannot continue"
            " in another directory"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"--run-dir {directory}: holds other files; give a directory that is not there yet")
    copying = directory.with_name(f".{directory.name}.{os.getpid()}.writing")
    lock = RunLock(run.path)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(run.path, copying, symlinks=True, ignore=_PARTIAL)
        write_record(copying, {**run.record, "id": directory.resolve().name})
        copying.rename(directory)
    except (OSError, shutil.Error) as error:
        raise DataError(f"--run-dir {directory}: the run cannot be copied there: {error}; free some space") from error
    finally:
        shutil.rmtree(copying, ignore_errors=True)
        lock.release()
    log.info("%s continues in %s", run.path, directory)
    return RunDirectory.open(directory)


def _same_run(run: RunDirectory, directory: Path) -> RunDirectory:
    found = RunDirectory.open(directory)
    same = ("kind", "what_hash", "seed", "started")
    if any(found.record.get(key) != run.record.get(key) for key in same):
        raise UsageError(f"--run-dir {directory}: holds another run; go on with it by `--resume {directory}`")
    return found
