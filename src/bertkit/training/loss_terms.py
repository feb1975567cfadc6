"""The loss of an update: named terms, each a sum over rows and their count, from one forward pass.

Not from a paper (contract: losses are sums and counts). Pretraining has one term per objective, fine-tuning the task's
loss; distillation adds comparisons with a teacher to either. Sibling step.py computes the gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

import torch

from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder


class MicroBatch(Protocol):
    """Packed sequences with their targets, computed together."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_items(self) -> int:
        """The maximum number of parts it can be split into."""

    def to(self, device: torch.device) -> Self: ...


Batch = TypeVar("Batch", bound=MicroBatch)


@dataclass(frozen=True)
class TermTotal:
    """One term over a whole batch: summed loss in nats, predictions, how many were right, and other counts."""

    sum: float
    count: int
    correct: int
    counters: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: TermTotal) -> TermTotal:
        names = dict.fromkeys([*self.counters, *other.counters])
        counters = {name: self.counters.get(name, 0) + other.counters.get(name, 0) for name in names}
        return TermTotal(self.sum + other.sum, self.count + other.count, self.correct + other.correct, counters)

    @property
    def mean(self) -> float:
        return self.sum / max(1, self.count)

    @property
    def accuracy(self) -> float:
        return self.correct / max(1, self.count)


def read_totals(parts: Sequence[Mapping[str, LossSum]]) -> list[dict[str, TermTotal]]:
    """The totals of micro-batches, all read from the device at once, so that a GPU is synchronised only once.

    Numbers are transferred as float64, which represents float32 and counts below 2^53 exactly.
    """
    losses = [loss for part in parts for loss in part.values()]
    numbers = [number for loss in losses for number in (loss.sum, loss.correct, *loss.counters.values())]
    if not numbers:
        return [{} for _ in parts]
    device = numbers[0].device
    read = iter(torch.stack([number.detach().to(device, torch.float64) for number in numbers]).tolist())
    return [{term: _total(loss, read) for term, loss in part.items()} for part in parts]


def _total(loss: LossSum, read: Iterator[float]) -> TermTotal:
    """A term's total from the next numbers in `read`."""
    return TermTotal(next(read), loss.count, int(next(read)), {name: int(next(read)) for name in loss.counters})


class LossTerms(ABC, Generic[Batch]):
    """The terms of a loss.

    Attributes:
        weights: by term, the factor of its mean in the total.
    """

    weights: Mapping[str, float]

    @abstractmethod
    def counts(self, batch: Batch) -> Mapping[str, int]:
        """How many rows each term sums over a micro-batch, known before the step."""

    @abstractmethod
    def losses(
        self, model: HeadedModel, batch: Batch, recorder: Recorder | None = None, *, train_encoder: bool = True
    ) -> Mapping[str, LossSum]:
        """Each term over a micro-batch, from one forward pass.

        Args:
            model: the run's model; if it has one head among its companions, the terms find it there.
            batch: on the model's device.
            recorder: reads or edits states during the pass.
            train_encoder: whether any weight of the encoder is trained; if not, no gradients are needed in it.
        """

    @abstractmethod
    def flops(self, model: HeadedModel, batches: Sequence[Batch]) -> float:
        """Floating-point operations of one update over these micro-batches, with one pass over each."""

    def has_accuracy(self, term: str) -> bool:
        """Whether the term counts how many of its rows are right."""
        return True

    def total(self, totals: Mapping[str, TermTotal]) -> float:
        """The loss: each term's mean times its weight; terms that are missing here are left out."""
        return sum(totals[term].mean * weight for term, weight in self.weights.items() if term in totals)
