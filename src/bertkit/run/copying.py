"""Continuing a run in another directory, for example when its disk is full.

Not from a paper. The copy is made in a temporary directory and then renamed, so it is either complete or absent. The
original run stays unchanged. Imports neither torch, pydantic nor yaml.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from bertkit.errors import DataError, UsageError
from bertkit.files import bytes_in, first_fault, unfinished_name
from bertkit.run.directory import RECORD, RunDirectory, write_record
from bertkit.run.lock import LOCK_FILE, RunLock
from bertkit.run.seal import runs_within
from bertkit.visible import shell_word

_PARTIAL = shutil.ignore_patterns(LOCK_FILE, "*.writing", ".writing-*", "*.tmp")
_TRAINING = ("finetune", "distill", "pretrain")
"""A suite of these kinds finds its runs in its own directory."""

log = logging.getLogger(__name__)


def run_in_directory(run: RunDirectory, directory: Path | None) -> RunDirectory:
    """The run itself, or a copy of it in another directory.

    Args:
        run: the run to resume.
        directory: where to continue it; None or its own directory: where it is. A copy made earlier is used unchanged.

    Raises:
        UsageError: a process is writing the run, it is a study or evaluation with runs of its own, or the directory
            contains something else.
        DataError: the copy cannot be written.
    """
    if directory is None or directory.resolve() == run.path.resolve():
        return run
    if (directory / RECORD).is_file():
        return _same_run(run, directory)
    if run.record["kind"] not in _TRAINING and any(runs_within(run.path)):
        raise UsageError(
            f"--run-dir {directory}: {run.path} contains further runs and has recorded their paths, so it cannot"
            " continue in another directory; resume it without --run-dir"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"--run-dir {directory}: contains other files; give a directory that does not exist yet")
    copying = unfinished_name(directory, "writing")
    lock = RunLock(run.path)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(run.path, copying, symlinks=True, ignore=_PARTIAL)
        write_record(copying, {**run.record, "id": directory.resolve().name})
        copying.rename(directory)
    except OSError as error:
        raise DataError(
            f"--run-dir {directory}: the run cannot be copied there: {first_fault(error)}; it takes"
            f" {bytes_in(run.path):,} bytes; free some space"
        ) from error
    finally:
        shutil.rmtree(copying, ignore_errors=True)
        lock.release()
    log.info("%s continues in %s", run.path, directory)
    return RunDirectory.open(directory)


def _same_run(run: RunDirectory, directory: Path) -> RunDirectory:
    found = RunDirectory.open(directory)
    same = ("kind", "what_hash", "seed", "started")
    if any(found.record.get(key) != run.record.get(key) for key in same):
        raise UsageError(
            f"--run-dir {directory}: contains another run; continue it with `--resume {shell_word(directory)}`"
        )
    return found
