"""The errors with which a command can end, each with its exit code.

The message is what the user reads: it names the file, line or dotted key, the value, what was expected, and the remedy.
Any other exception is a bug (exit code 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class BertkitError(Exception):
    """An error that a user can understand and correct; never shown with a traceback."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its message, which a subclass may have made from other arguments."""
        return _unpickled, (type(self), self.args), self.__dict__


def _unpickled(made: type[BertkitError], arguments: tuple[Any, ...]) -> BertkitError:
    """An error with this message, without its class's `__init__`."""
    return made.__new__(made, *arguments)


class UsageError(BertkitError, ValueError):
    """Wrong usage or an invalid recipe."""

    exit_code = 2


@contextmanager
def below(key: str) -> Iterator[None]:
    """Within this context, usage errors, whose messages start with a key, name it as one of this section."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{key}.{error}") from error


class DataError(BertkitError):
    """An invalid data set, model or file: missing, truncated, altered, of the wrong kind."""

    exit_code = 3


def worker_ended(remedy: str) -> DataError:
    """The error of a command one of whose worker processes was killed from outside."""
    return DataError(f"a worker process ended unexpectedly, perhaps for lack of memory; {remedy}")


class MissingColumnError(DataError):
    """A named column is missing in a table: an error that concerns all its rows."""


class DivergedError(BertkitError):
    """Training diverged: the loss or the gradient is no longer finite."""

    exit_code = 4


class CheckError(BertkitError):
    """Verification failed."""

    exit_code = 5


class StoppedError(BertkitError):
    """Stopped early by a signal or a time limit, with a checkpoint saved.

    Args:
        reason: what stopped it, where, and what is saved.
        remedy: how to continue; a caller that stops because of this error gives its own.
    """

    exit_code = 75

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason = reason


_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "std::bad_alloc",
    "failed to map segment from shared object",  # while a library is loaded
)
"""Parts of messages of errors that have no class of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory was exhausted."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without importing it
        return True
    return isinstance(error, RuntimeError | ImportError) and any(message in str(error) for message in _OUT_OF_MEMORY)


REINSTALL = "a package that bertkit needs is missing or damaged: pip install --force-reinstall bertkit"


def is_of_installation(error: BaseException) -> bool:
    """Whether an import failed that is not one of bertkit's own modules."""
    return isinstance(error, ImportError) and (error.name or "bertkit").partition(".")[0] != "bertkit"


def first_line(error: BaseException) -> str:
    """The first line of a library's message, or of the message of its cause, without a traceback."""
    cause = error.__cause__ or error
    text = str(cause).strip() or str(error).strip() or type(cause).__name__
    return text.splitlines()[0]
