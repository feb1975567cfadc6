"""Timing several works so that they can be compared: warmed up, then in rounds, each of them once a round.

Own design. A machine drifts (other processes, temperature, clock rate) by more than models differ, so that a time
cannot be compared with one that was taken a minute later. In a round all works are timed one after the other, in an
order that moves on by one a round; their ratio is taken in each round, and the median over the rounds is reported.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
"""Seconds that pass, and seconds that this process has computed, all threads together."""
LEAST_SECONDS = 0.02
"""A shorter work is repeated within a round, until the clock's grain and the calls around it do not count."""
_WARM_SECONDS = 1.0
"""A work that took longer is warm after one call."""


@dataclass(frozen=True)
class Timing:
    """How long one work took.

    Attributes:
        seconds: of one call, in each round.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return float(np.median(self.seconds))

    @property
    def quartiles(self) -> tuple[float, float]:
        """The middle half of the rounds is between these; seconds."""
        low, high = np.percentile(self.seconds, [25, 75])
        return float(low), float(high)

    def times_as_fast_as(self, other: Timing) -> float:
        """The other's time over this one's: the median of the rounds' own ratios.

        Args:
            other: of the same rounds.
        """
        return float(np.median(np.array(other.seconds) / np.array(self.seconds)))


def time_in_rounds(
    works: Sequence[Callable[[], object]],
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    after_round: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Time each work once a round, and in another order every round.

    Args:
        works: what is timed; each returns when it is done.
        rounds: at least 1.
        clock: seconds.
        after_round: called behind each round, untimed.
    """
    calls = [_warm_up(work, clock) for work in works]
    seconds: list[list[float]] = [[] for _ in works]
    with _collector_at_rest():
        for number in range(rounds):
            for place in range(len(works)):
                index = (number + place) % len(works)
                seconds[index].append(_timed(works[index], calls[index], clock))
            after_round()
    return [Timing(tuple(each)) for each in seconds]


def _warm_up(work: Callable[[], object], clock: Callable[[], float]) -> int:
    """Call it until it is warm; how many calls of it make one measurement."""
    took = _timed(work, 1, clock)
    if took < _WARM_SECONDS:
        took = _timed(work, 1, clock)
    return max(1, math.ceil(LEAST_SECONDS / took)) if took > 0 else 1


def _timed(work: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(calls):
        work()
    return (clock() - started) / calls


@dataclass
class ProcessorShare:
    """How much of the time this process was computing; 1 for a thread that was never interrupted.

    Attributes:
        of_processor: processor seconds over seconds, all threads together; None while it is not known.
    """

    of_processor: float | None = None


@contextmanager
def processor_share() -> Iterator[ProcessorShare]:
    """Known when the body is done; well below 1, other processes had the rest, and the times are not reliable."""
    share = ProcessorShare()
    started, computed = time.perf_counter(), time.process_time()
    yield share
    share.of_processor = (time.process_time() - computed) / max(time.perf_counter() - started, 1e-9)


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """This many threads for torch's operators while the body runs; as many as there are where None."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Python's collector runs before the body and not within."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
