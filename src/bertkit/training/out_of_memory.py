"""A micro-batch that does not fit into memory, and what is tried instead.

Not from a paper. The loss of an update does not depend on how its batch is split (step.py), so an update that ran out
of memory is repeated with smaller micro-batches. The loss is the same up to the order of float sums; only dropout draws
other random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic

from bertkit.errors import DataError
from bertkit.training.loss_terms import Batch

REMEDY = (
    "set engine.activation_checkpointing, give shorter sequences, take a smaller model, or compute in bf16 with"
    " --precision bf16"
)


class MicroBatchMemoryError(DataError):
    """A micro-batch did not fit into memory. A trainer repeats the update with smaller ones.

    Args:
        reason: torch's message.
        tokens: of the largest micro-batch of the update.
        items: the maximum number of parts it can be split into.
    """

    def __init__(self, reason: str, tokens: int, items: int) -> None:
        what = f"{tokens:,} tokens at once" if items > 1 else f"a single sequence of {tokens:,} tokens"
        super().__init__(f"out of memory in an update with {what}: {reason}; {REMEDY}")
        self.reason = reason
        self.tokens = tokens
        self.items = items

    def __reduce__(self) -> tuple[type[MicroBatchMemoryError], tuple[str, int, int]]:
        return type(self), (self.reason, self.tokens, self.items)  # for pickling: a job sends it to its parent

    def smaller(self, limit: int) -> int:
        """The micro-batch size in tokens to try next, after at most `limit`; 0: there is no smaller one."""
        return min(limit, self.tokens) // 2 if self.items > 1 else 0


class PreparedUpdates(Generic[Batch]):
    """The micro-batches of each remaining update of a run, which can be prepared again in smaller parts.

    Args:
        make: creates those of the run's next update and of all later ones.
    """

    def __init__(self, make: Callable[[], Generator[Sequence[Batch], None, None]]) -> None:
        self._make = make
        self._prepared = make()

    def __iter__(self) -> Iterator[Sequence[Batch]]:
        while (batches := next(self._prepared, None)) is not None:
            yield batches

    def prepared_again(self) -> Sequence[Batch]:
        """The micro-batches of the run's next update, prepared again, as all later ones will be."""
        self._prepared.close()
        self._prepared = self._make()
        return next(self._prepared)

    def close(self) -> None:
        """Stop preparing."""
        self._prepared.close()
