"""Times several workloads comparably: warm-up, then rounds, with each workload once per round.

A machine drifts (other processes, temperature, clock rate) by more than models differ, so a time cannot be compared
with one taken a minute later. In each round, all workloads are timed one after the other, in an order that rotates by
one per round. Ratios are taken within each round, and the median over the rounds is reported.
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
"""Wall-clock seconds, and processor seconds of this process over all threads."""
LEAST_SECONDS = 0.02
"""A shorter workload is repeated within a round, to make clock resolution and call overhead negligible."""
_WARM_SECONDS = 1.0
"""A workload that takes longer is warm after one call."""


@dataclass(frozen=True)
class Timing:
    """The times of one workload.

    Attributes:
        seconds: time of one call in each round.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return float(np.median(self.seconds))

    @property
    def quartiles(self) -> tuple[float, float]:
        """The quartiles over the rounds, in seconds."""
        low, high = np.percentile(self.seconds, [25, 75])
        return float(low), float(high)

    def times_as_fast_as(self, other: Timing) -> float:
        """The other's time divided by this one's: the median of the ratios within rounds.

        Args:
            other: times from the same rounds.
        """
        return float(np.median(np.array(other.seconds) / np.array(self.seconds)))


def time_in_rounds(
    works: Sequence[Callable[[], object]],
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    after_round: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Time each workload once per round, in a different order every round.

    Args:
        works: the workloads; each returns when it is done.
        rounds: at least 1.
        clock: returns seconds.
        after_round: called after each round, untimed.
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
    """Call a workload until it is warm; return the number of calls per measurement."""
    took = _timed(work, 1, clock)
    if took < _WARM_SECONDS:
        took = _timed(work, 1, clock)
    return max(1, math.ceil(LEAST_SECONDS / took)) if took > 0 else 1


def _timed(work: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(calls):
        work()
    return (clock() - started) / calls


def processor_share() -> Callable[[], float]:
    """A function that returns the share of the time since this call in which the process was computing: processor
    seconds of all threads divided by wall-clock seconds. It is 1 for a thread that was never interrupted; well below
    that, other processes used the rest, and the times are not reliable."""
    started, computed = time.perf_counter(), time.process_time()
    return lambda: (time.process_time() - computed) / max(time.perf_counter() - started, 1e-9)


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """Use this many threads for torch's operators while the body runs; keep the current number if None."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Run Python's garbage collector before the body, and disable it within."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
