"""Stopping early between two steps, on a signal or a time limit.

Not from a paper. The first SIGINT, SIGTERM or SIGHUP ends the run after the current step, with a checkpoint; a second
SIGINT ends it at once. Schedulers repeat SIGTERM: further ones change nothing, not even while the command ends.
Therefore the handler stays installed after a signal, and the command line restores it (cli/app.py). It also stays if a
rank is lost: torchrun then sends SIGTERM to the other ranks, possibly while they report the loss.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

from bertkit.progress import ProgressMeter
from bertkit.ranks import RankLostError

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Whether and why to stop; active while the context is open.

    Args:
        max_minutes: time limit from the opening of the context; None: no limit.
    """

    signal: str | None = None
    """The name of the received signal."""

    def __init__(self, max_minutes: float | None = None) -> None:
        self._limit_seconds = None if max_minutes is None else max_minutes * 60
        self._opened = time.monotonic()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._opened = time.monotonic()
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP under nohup
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_ending = self.signal is not None or isinstance(error, RankLostError)
        for number, handler in self._previous.items():
            if not is_ending or number is signal.SIGINT:
                signal.signal(number, handler)

    @property
    def reason(self) -> str | None:
        """The signal or the time limit, if the run has to stop."""
        if self.signal is not None:
            return self.signal
        if self._limit_seconds is not None and time.monotonic() - self._opened >= self._limit_seconds:
            return "the time limit"  # without its length: runs may share one limit
        return None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.signal == name == "SIGINT":
            raise KeyboardInterrupt
        self.signal = name


@dataclass(frozen=True)
class StoppingMeter:
    """A progress display whose updates call `check`, which can stop the run."""

    meter: ProgressMeter
    check: Callable[[], None]

    def update(self, completed: int, note: str | None = None) -> None:
        self.meter.update(completed, note)
        self.check()


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt the block as Ctrl-C does, except in a `StopRequest`; later ones change nothing."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    known = {number: signal.getsignal(number) for number in STOPPING if number is not signal.SIGINT}
    previous = {number: handler for number, handler in known.items() if handler is not signal.SIG_IGN}
    for number in previous:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) is interrupt:  # else a signal has come, and the command ends
                signal.signal(number, handler)
