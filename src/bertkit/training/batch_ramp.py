"""A batch size that grows during the run, and the number of sequences read by any range of updates.

Warner et al. 2024, ModernBERT, arXiv:2412.13663 (sequence_packer.py: each size for as many updates); Geiping and
Goldstein 2022, arXiv:2212.14034 (torch_default.py: each size for as many sequences). The size is a pure function of the
update number, so a resumed run reads the same batches.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Literal

from pydantic import Field

from bertkit.settings import Settings


class BatchRamp(Settings):
    """Batches of `start` sequences, growing by `increment` up to `batch_sequences`."""

    start: int = Field(ge=1, description="Sequences per update at the start.")
    increment: int = Field(ge=1, description="Number of sequences by which each batch size exceeds the one before.")
    until: float = Field(gt=0, le=1, description="Share of the run's updates after which a batch has batch_sequences.")
    equal: Literal["updates", "sequences"] = Field(
        "updates",
        description="Whether each batch size before the last is used for equally many updates or equally many"
        " sequences.",
    )

    def smaller(self, full: int) -> list[int]:
        """The sizes before the full one.

        Raises:
            ValueError: the sizes do not reach the full size exactly.
        """
        if self.start >= full or (full - self.start) % self.increment:
            raise ValueError(
                f"batch_ramp: from {self.start} in steps of {self.increment} the batch never reaches batch_sequences"
                f" ({full}); change start, increment or batch_sequences, or leave the ramp out"
                " (--set optimisation.batch_ramp=null)"
            )
        return list(range(self.start, full, self.increment))


def updates_for(sequences: float, full: int, ramp: BatchRamp | None, *, at_most: bool = False) -> int:
    """Updates of the shortest run that reads at least this many sequences (with `at_most`: of the longest run that
    reads no more); at least one."""
    smallest = full if ramp is None else ramp.start
    runs = range(1, math.ceil(sequences / smallest) + 1)

    def read(steps: int) -> int:
        return BatchSizes(full, steps, ramp).before(steps)

    if at_most:
        return max(1, bisect_right(runs, sequences, key=read))
    return max(1, bisect_left(runs, sequences, key=read) + 1)


class BatchSizes:
    """Number of sequences in each update of a run.

    Args:
        full: sequences of a full batch.
        steps: of the run.
        ramp: the growth at the beginning; None: every batch is full.
    """

    def __init__(self, full: int, steps: int, ramp: BatchRamp | None = None) -> None:
        smaller = [] if ramp is None else ramp.smaller(full)
        self._sizes = [*smaller, full]
        self._starts = [0]  # the first update of each size
        if ramp is not None:
            shares = [1.0 if ramp.equal == "updates" else 1 / size for size in smaller]
            whole = ramp.until * steps / sum(shares)
            self._starts += [min(steps, round(whole * share)) for share in accumulate(shares)]
        lengths = [after - before for before, after in zip(self._starts, self._starts[1:], strict=False)]
        self._before = list(accumulate((n * size for n, size in zip(lengths, smaller, strict=True)), initial=0))

    def at(self, step: int) -> int:
        """Sequences in update number `step`, from 0."""
        return self._sizes[self._number(step)]

    def before(self, step: int) -> int:
        """Sequences in all updates before that one."""
        number = self._number(step)
        return self._before[number] + (step - self._starts[number]) * self._sizes[number]

    def ranges(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Ranges of updates of one size: (first update, update after the last, sequences of each)."""
        while first < end:
            number = self._number(first)
            next_start = self._starts[number + 1] if number + 1 < len(self._starts) else end
            yield first, min(end, next_start), self._sizes[number]
            first = min(end, next_start)

    def _number(self, step: int) -> int:
        return bisect_right(self._starts, step) - 1
