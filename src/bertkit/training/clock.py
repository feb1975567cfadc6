"""The clock of a run whose learning rate depends on time, and its record.

Izsak et al. 2021, arXiv:2104.07705 (a budget of 24 hours; schedules.py of the released code), and Geiping and Goldstein
2022, arXiv:2212.14034 (cramming's budget schedules). There a repetition has other learning rates. Here the start time
of each update is recorded in the run's directory: a resumed run continues exactly, updates lost by a kill are repeated
identically, and another run can follow the same times.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from bertkit.errors import DataError, UsageError
from bertkit.files import open_to_write
from bertkit.training.schedules import Schedule

TIMES_FILE = "times.tsv"
"""One line per update: its start in seconds since the beginning of the run, a tab, and its learning rate."""


class RunClock:
    """Seconds of a run at the start of each update; time while the run is stopped does not count.

    Args:
        path: the record, which is continued if it exists.
        hours: length of the run.
        rate: the learning rate at a share of these hours.
        follows: the record of another run, whose times are used as far as it goes.
        now: returns the time in seconds.

    Raises:
        DataError: a record cannot be read.
    """

    def __init__(
        self,
        path: Path,
        hours: float,
        rate: Callable[[float], float],
        *,
        follows: Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._budget = hours * 3600
        self._rate = rate
        self._now = now
        if follows is not None and not follows.is_file():
            raise DataError(f"{follows}: there are no recorded times; name the directory of a run with clock: time")
        self._seconds, whole = _read(path)
        self._followed = array("d") if follows is None else _read(follows)[0]
        self._file = open_to_write(path, "ab")
        self._file.truncate(whole)
        self._begin = now()

    @classmethod
    def of(
        cls, schedule: Schedule, follow_times: str | None, directory: Path, *, now: Callable[[], float]
    ) -> RunClock | None:
        """The clock of a schedule that goes by time, recorded in the run's directory; None for any other schedule.

        Args:
            schedule: of the learning rate.
            follow_times: the directory of a run whose times are used as far as they go.
            directory: of this run.
            now: returns the time in seconds.

        Raises:
            UsageError: another run's times are to be followed, but the schedule does not go by time.
            DataError: a record cannot be read.
        """
        if schedule.hours is not None:
            other = None if follow_times is None else Path(follow_times).expanduser() / TIMES_FILE
            return cls(directory / TIMES_FILE, schedule.hours, schedule.at_progress, follows=other, now=now)
        if follow_times is not None:
            raise UsageError("engine.follow_times works only with optimisation.schedule.clock: time; leave it out")
        return None

    def mark(self, step: int) -> None:
        """Record that update number `step`, from 0, begins now; a repeated update keeps its original time."""
        if step < len(self._seconds):
            self._begin = self._now() - self._seconds[step]
            return
        if step > len(self._seconds):
            raise DataError(
                f"{self._path}: has the times of {len(self._seconds)} updates, but the checkpoint is of update {step};"
                " start a new run"
            )
        if step < len(self._followed):
            self._begin = self._now() - self._followed[step]
            self._seconds.append(self._followed[step])
        else:
            self._seconds.append(self._now() - self._begin if step else 0.0)
        self._file.write(f"{self._seconds[step]!r}\t{self._rate(self.share(step))!r}\n".encode())
        self._file.flush()

    def share(self, step: int) -> float:
        """The share of the hours that had passed when a marked update began, at most 1."""
        return min(1.0, self._seconds[step] / self._budget)

    def in_words(self, step: int) -> str:
        """How much of the time had passed when a marked update began."""
        return f"{self.share(step):.0%} of {self._budget / 3600:g} hours"

    def is_over(self, step: int) -> bool:
        """Whether there is no time left for the marked update number `step`."""
        return self._seconds[step] >= self._budget

    def sync(self) -> None:
        """Flush the record to disk; called before a checkpoint."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the record."""
        self._file.close()


def _read(path: Path) -> tuple[array[float], int]:
    """The times of a record, and the number of bytes in complete lines: a kill can truncate the last one."""
    contents = path.read_bytes() if path.exists() else b""
    whole = contents.rfind(b"\n") + 1
    try:
        times = [float(line.split(b"\t")[0]) for line in contents[:whole].splitlines()]
    except ValueError:
        raise DataError(f"{path}: expected one line per update with seconds, a tab and a learning rate") from None
    return array("d", times), whole
