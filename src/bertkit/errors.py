"""The faults that a command can end with, each with its exit code.

A fault's message is what the user reads: it names the file, line or dotted key, the value, what was expected, and the
remedy. Anything raised that is not one of these is a bug (exit code 1).
"""

from __future__ import annotations


class BertkitError(Exception):
    """A fault that a user can understand and mend; never shown with a traceback."""

    exit_code = 1


class UsageError(BertkitError, ValueError):
    """Wrong usage or a faulty recipe."""

    exit_code = 2


class DataError(BertkitError):
    """A data set, model or file at fault: missing, truncated, altered, of the wrong kind."""

    exit_code = 3


class DivergedError(BertkitError):
    """Training diverged: the loss or the gradient stopped being finite."""

    exit_code = 4


class CheckError(BertkitError):
    """A check was run and said no."""

    exit_code = 5


class StoppedError(BertkitError):
    """Stopped early by a signal or a time limit, with a checkpoint saved; `--resume` goes on."""

    exit_code = 75


def first_line(fault: BaseException) -> str:
    """The first line of a library's message, or of the message that caused it, without a trace."""
    cause = fault.__cause__ or fault
    text = str(cause).strip() or str(fault).strip() or type(cause).__name__
    return text.splitlines()[0]
