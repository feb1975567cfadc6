"""Executes the independent runs of a suite or a study.

Not from a paper. The part specific to training: a signal or a time limit ends all runs with checkpoints, and each
finished run is checked and recorded. The executors are in `bertkit.jobs`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from bertkit.jobs.job import DoneJob, Job
from bertkit.jobs.manifest import check_files, write_manifest
from bertkit.jobs.registry import executor_of
from bertkit.jobs.settings import ExecutorSettings
from bertkit.training.interrupt import StopRequest

log = logging.getLogger(__name__)


def run_jobs(
    settings: ExecutorSettings, jobs: Iterable[Job], directory: Path, *, minutes_left: float | None = None
) -> None:
    """Execute jobs, each of which returns the hashes of its files (`bertkit.jobs.manifest.hashes`).

    Args:
        settings: the executor, and the number of parallel jobs.
        jobs: the next one is taken when a worker is free.
        directory: where `jobs.json` is written.
        minutes_left: after this time, all jobs stop.

    Raises:
        StoppedError: a signal or the time limit came first; the runs have saved checkpoints.
        BertkitError: the first error of a job; the other jobs are stopped.
    """
    moment, waiting = until(minutes_left), iter(jobs)
    first = next(waiting, None)
    if first is None:
        return

    done: list[DoneJob] = []
    with executor_of(settings) as executor, StopRequest(minutes_until(moment)) as request:
        try:
            for each in executor.run(chain([first], waiting), stop=lambda: request.reason):
                check_files(each)
                done.append(each)
                log.info("%s is finished (%s)", each.job.name, each.worker)
        finally:
            write_manifest(directory, done)


def until(minutes_left: float | None) -> float | None:
    """The time at which this many minutes will have passed, on a clock shared by all machines."""
    return None if minutes_left is None else time.time() + minutes_left * 60


def minutes_until(moment: float | None) -> float | None:
    """The minutes left, on a worker."""
    return None if moment is None else max(0.0, moment - time.time()) / 60
