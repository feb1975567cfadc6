"""A micro-batch that does not fit into memory: how it is recognised, and what is tried in its place.

Own design. The loss of an update does not depend on how its batch is cut (step.py), so an update for which memory did
not suffice is made again from smaller micro-batches: the same loss up to the order of float sums. Only the numbers that
dropout draws are others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic

import torch

from bertkit.errors import DataError
from bertkit.training.loss_terms import Batch

_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)
"""Of errors of torch and triton that have no class of their own."""

REMEDY = (
    "set engine.activation_checkpointing, give shorter sequences, take a smaller model, or compute in bf16 with"
    " --precision bf16"
)


def exhausts_memory(error: BaseException) -> bool:
    """Whether an error means that memory did not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


class MicroBatchMemoryError(DataError):
    """Memory did not suffice for a micro-batch. A trainer makes the update again from smaller ones.

    Args:
        reason: torch's message.
        tokens: of the largest micro-batch of the update.
        items: into how many parts it can be cut, at most.
    """

    def __init__(self, reason: str, tokens: int, items: int) -> None:
        what = f"{tokens:,} tokens at once" if items > 1 else f"a single sequence of {tokens:,} tokens"
        super().__init__(f"out of memory in an update with {what}: {reason}; {REMEDY}")
        self.reason = reason
        self.tokens = tokens
        self.items = items

    def __reduce__(self) -> tuple[type[MicroBatchMemoryError], tuple[str, int, int]]:
        return type(self), (self.reason, self.tokens, self.items)  # a job's process sends it to the one that waits

    def smaller(self, limit: int) -> int:
        """The tokens of a micro-batch to try next, where at most `limit` were allowed; 0: there is no smaller one."""
        return min(limit, self.tokens) // 2 if self.items > 1 else 0


class PreparedUpdates(Generic[Batch]):
    """The micro-batches of each remaining update of a run, which can be prepared again, cut smaller.

    Args:
        make: those of the run's next update and of all after it.
    """

    def __init__(self, make: Callable[[], Generator[Sequence[Batch], None, None]]) -> None:
        self._make = make
        self._prepared = make()

    def __iter__(self) -> Iterator[Sequence[Batch]]:
        while (batches := next(self._prepared, None)) is not None:
            yield batches

    def prepared_again(self) -> Sequence[Batch]:
        """Those of the run's next update, prepared anew, as all after it will be."""
        self._prepared.close()
        self._prepared = self._make()
        return next(self._prepared)

    def close(self) -> None:
        """Stop preparing."""
        self._prepared.close()
