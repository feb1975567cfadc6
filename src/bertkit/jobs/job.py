"""One independent part of a command's work, and how a worker carries it out.

Not from a paper. A job writes its result to disk or returns it. It depends only on its own arguments, so where and how
often it runs does not change a byte of the result.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from bertkit.code_hash import code_sha256
from bertkit.errors import BertkitError, DataError, StoppedError, UsageError, first_line, is_out_of_memory
from bertkit.openmp import given_threads, usable_cores

Value = TypeVar("Value")


@dataclass(frozen=True)
class Job:
    """What to do.

    Attributes:
        name: for messages and the manifest.
        work: a function of a module with its arguments bound (`functools.partial`), so that it can be pickled.
    """

    name: str
    work: Callable[[], Any]


@dataclass(frozen=True)
class DoneJob:
    """A finished job.

    Attributes:
        job: the job.
        value: the return value of its work.
        worker: host and process that ran it.
        attempts: how often it was started.
    """

    job: Job
    value: Any
    worker: str
    attempts: int


@dataclass(frozen=True)
class Place:
    """What a worker must have in common with the command to give the same result.

    Attributes:
        directory: the working directory, to which paths are relative.
        code, torch: hash of bertkit's code, and torch's version.
        threads: of a job's matrix products; they affect the last bits.
    """

    directory: str
    code: str
    torch: str
    threads: int

    @classmethod
    def here(cls, threads: int) -> Place:
        return cls(os.getcwd(), code_sha256(), _torch_version(), threads)

    def enter(self) -> None:
        """Prepare the worker's process.

        Raises:
            UsageError: its code differs.
            DataError: it cannot see the working directory.
        """
        other = {"bertkit": (code_sha256(), self.code), "torch": (_torch_version(), self.torch)}
        for name, (found, wanted) in other.items():
            if found != wanted:
                raise UsageError(
                    f"the worker on {socket.gethostname()} has another {name} ({found[:12]}, the command has"
                    f" {wanted[:12]}); install the same version everywhere"
                )
        try:
            os.chdir(self.directory)
        except OSError as error:
            raise DataError(
                f"the worker on {socket.gethostname()} cannot see {self.directory} ({error.strerror}); start the"
                " command in a directory that all machines share"
            ) from error


class JobBugError(Exception):
    """A job failed because of a bug; the cause has the worker's traceback."""


class _WorkerError(Exception):
    """A traceback from a worker."""


@dataclass(frozen=True)
class Reply:
    """What a worker sends back: a value, an error that the user can correct, or the first line and the traceback of a
    bug."""

    worker: str
    value: Any = None
    error: BertkitError | None = None
    bug: str | None = None
    trace: str = ""

    def value_of(self, job: Job) -> Any:
        """The value.

        Raises:
            BertkitError: the job's error.
            JobBugError: the work failed because of a bug; the message names the job.
        """
        if self.error is not None:
            raise self.error
        if self.bug is not None:
            raise JobBugError(f"{job.name}: {self.bug} ({self.worker})") from _WorkerError(self.trace)
        return self.value


def itself(value: Value) -> Value:
    """The value itself: the form in which local processes get shared values."""
    return value


def reply_of(job: Job, place: Place) -> Reply:
    """Carry out a job in this worker process."""
    worker = f"{socket.gethostname()}:{os.getpid()}"
    try:
        place.enter()
        _set_threads(place.threads)
        return Reply(worker, job.work())
    except BertkitError as error:
        return Reply(worker, error=error)
    except KeyboardInterrupt:
        return Reply(worker, error=StoppedError(f"interrupted in {job.name}"))
    except Exception as bug:
        told = f"{type(bug).__name__}: {bug if isinstance(bug, OSError) else first_line(bug)}"
        if isinstance(bug, OSError) or is_out_of_memory(bug):
            told = "; ".join([told, *getattr(bug, "__notes__", ())])
            return Reply(worker, error=DataError(f"{job.name}: {told} ({worker}); check its disk and memory"))
        return Reply(worker, bug=told, trace=traceback.format_exc())


def threads_of(jobs: int) -> int:
    """Threads per job for this many jobs at a time: OMP_NUM_THREADS, else an equal share of this machine's cores."""
    return given_threads() or max(1, usable_cores() // jobs)


@cache
def _torch_version() -> str:
    from importlib.metadata import version

    return version("torch")


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
