"""Starting independent jobs, waiting for them, and restarting jobs whose worker is lost.

Not from a paper; the engines are multiprocessing (local.py) and Ray (ray_cluster.py). If a worker is killed (for lack
of memory, or with its machine), only its current job is affected: the job is started again, and continues from its own
checkpoints if it has any.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Self, TypeVar

from bertkit.errors import DataError, StoppedError
from bertkit.jobs.job import DoneJob, Job, Place, Reply, Value, itself

ATTEMPTS = 3
"""Workers that a job may lose before the job itself is assumed to be the cause."""
_POLL_SECONDS = 0.2

Handle = TypeVar("Handle")

log = logging.getLogger(__name__)


class WorkerLostError(Exception):
    """The process or machine that was running a job is gone."""


@dataclass
class _Attempt:
    """A running job, with its place in the order and the number of the attempt."""

    job: Job
    number: int
    count: int = 1


class Executor(ABC, Generic[Handle]):
    """Runs independent jobs, a bounded number at a time; a context manager that owns its workers.

    Args:
        jobs: number of jobs at a time.
        threads: of each job.
    """

    def __init__(self, jobs: int, threads: int) -> None:
        self.jobs = jobs
        self.place = Place.here(threads)

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None:
        """End the workers."""

    def run(
        self,
        jobs: Iterable[Job],
        *,
        stop: Callable[[], str | None] = lambda: None,
        ordered: bool = False,
        ahead: int = 1,
    ) -> Iterator[DoneJob]:
        """Carry out jobs.

        Args:
            jobs: in the order in which they are started; each is read when a worker is free for it.
            stop: returns the reason to stop, once there is one.
            ordered: yield jobs in their order rather than as they finish; a job that finishes early then waits and
                counts as running.
            ahead: number of jobs running or waiting per worker.

        Raises:
            StoppedError: `stop` gave a reason; the jobs were signalled and have ended.
            BertkitError: the first error of a job; the others were signalled to stop.
            DataError: a job has lost its worker repeatedly.
            JobBugError: a job failed because of a bug.
        """
        waiting, limit = enumerate(jobs), self.jobs * ahead
        running: dict[Handle, _Attempt] = {}
        done: dict[int, DoneJob] = {}
        given, is_exhausted = 0, False
        try:
            while True:
                if (reason := stop()) is not None:
                    raise StoppedError(f"stopped by {reason}, checkpoints saved")
                while not is_exhausted and len(running) + (len(done) if ordered else 0) < limit:
                    number, job = next(waiting, (-1, None))
                    if job is None:
                        is_exhausted = True
                    else:
                        running[self._submit(job)] = _Attempt(job, number)
                if is_exhausted and not running:
                    return
                for handle in self._finished(list(running), _POLL_SECONDS):
                    attempt = running.pop(handle)
                    try:
                        reply = self._reply(handle)
                    except WorkerLostError as lost:
                        running[self._again(attempt, lost)] = attempt
                        continue
                    value = reply.value_of(attempt.job)
                    done[attempt.number] = DoneJob(attempt.job, value, reply.worker, attempt.count)
                if not ordered:
                    yield from done.values()
                    done.clear()
                while given in done:
                    yield done.pop(given)
                    given += 1
        finally:
            self._end(list(running))

    def _again(self, attempt: _Attempt, lost: WorkerLostError) -> Handle:
        """Restart a job whose worker is lost."""
        if attempt.count >= ATTEMPTS:
            raise DataError(
                f"{attempt.job.name}: lost its worker {ATTEMPTS} times ({lost}); see its log.txt; if memory is short,"
                " use fewer --jobs"
            )
        log.warning("%s: its worker is lost (%s); restarting the job", attempt.job.name, lost)
        attempt.count += 1
        return self._submit(attempt.job)

    def share(self, value: Value) -> Callable[[], Value]:
        """A function that gives a worker a value that many jobs read; the value is sent only once if the engine can."""
        return partial(itself, value)

    @abstractmethod
    def _submit(self, job: Job) -> Handle:
        """Start a job."""

    @abstractmethod
    def _finished(self, handles: Sequence[Handle], seconds: float) -> list[Handle]:
        """The handles of jobs that are done or lost, after waiting for at most this long."""

    @abstractmethod
    def _reply(self, handle: Handle) -> Reply:
        """The reply of a finished job.

        Raises:
            WorkerLostError: there is none.
        """

    @abstractmethod
    def _end(self, handles: Sequence[Handle]) -> None:
        """Signal workers to stop, as by SIGTERM, and wait for them."""
