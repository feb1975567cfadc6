"""The clock of a run whose learning rate falls with time, and its record.

Izsak et al. 2021, arXiv:2104.07705 (a budget of 24 hours; schedules.py of the released code), and Geiping and Goldstein
2022, arXiv:2212.14034 (cramming's budget schedules). There a repetition has other rates; here the time at which each
update began is kept in the run's directory, so that a resumed run continues exactly, updates that were lost by a kill
are repeated as they were, and another run can follow the same times.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from bertkit.errors import DataError

TIMES_FILE = "times.tsv"
"""A line for each update: the seconds after the run's beginning at which it began, a tab, and its learning rate."""


class RunClock:
    """Seconds of a run at the beginning of each update; time in which the run is stopped does not count.

    Args:
        path: the record, which is gone on with where there is one.
        hours: after which the run ends.
        rate: the learning rate at a share of these hours.
        follows: the record of another run, whose times hold as far as it goes.
        now: the time in seconds.

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
            raise DataError(f"{follows}: no times are recorded there; name the directory of a run with clock: time")
        self._seconds, whole = _read(path)
        self._followed = array("d") if follows is None else _read(follows)[0]
        self._file = path.open("ab")
        self._file.truncate(whole)
        self._begin = now()

    def mark(self, step: int) -> None:
        """Update number `step`, from 0, begins now; one that is made again began when it did."""
        if step < len(self._seconds):
            self._begin = self._now() - self._seconds[step]
            return
        if step > len(self._seconds):
            raise DataError(
                f"{self._path}: has the times of {len(self._seconds)} updates, and the checkpoint is of update {step};"
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
        """The share of the hours that was over as a marked update began, at most 1."""
        return min(1.0, self._seconds[step] / self._budget)

    def is_over(self, step: int) -> bool:
        """Whether there is no time for the marked update number `step`."""
        return self._seconds[step] >= self._budget

    def sync(self) -> None:
        """Force the record onto the disk; called before a checkpoint."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the record."""
        self._file.close()


def _read(path: Path) -> tuple[array[float], int]:
    """The times of a record, and the bytes of its whole lines: a kill may have torn the last."""
    contents = path.read_bytes() if path.exists() else b""
    whole = contents.rfind(b"\n") + 1
    try:
        times = [float(line.split(b"\t")[0]) for line in contents[:whole].splitlines()]
    except ValueError:
        raise DataError(f"{path}: expected a line of seconds, a tab and a learning rate for each update") from None
    return array("d", times), whole
