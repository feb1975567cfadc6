"""What an objective is: a corruption of samples in a worker, and a loss over the encoder's states in the step.

A loss is a sum and a count, never a mean: the loop divides once, by the count over all micro-batches and ranks, so that
gradient accumulation and world size change nothing.

Shapes: T packed tokens, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.models.pretraining import PretrainingModel
from bertkit.settings import Settings


@dataclass(frozen=True)
class LossSum:
    """One term over one micro-batch.

    Attributes:
        sum: summed loss in nats, a scalar that carries the gradient.
        count: how many predictions it sums.
        correct: how many of them were right, a scalar without gradient.
    """

    sum: Tensor
    count: int
    correct: Tensor


class Objective(Settings, ABC):
    """One term of the loss. An objective is its own settings: plain data that travels to workers."""

    weight: float = Field(1.0, ge=0, description="Factor of this term's mean in the total loss.")

    term: ClassVar[str]
    """Its name in the recipe, in the metrics and among the model's heads."""

    needs_label: ClassVar[bool] = False
    """Whether the layout must make a label of this name for every sequence."""

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Corrupt samples and mark targets; the default leaves them as they are."""
        return samples

    @abstractmethod
    def expected_count(self, length: int) -> float:
        """How many predictions a sequence of this many tokens holds, for estimates."""

    @abstractmethod
    def count(self, batch: PackedBatch) -> int:
        """How many predictions a micro-batch holds, known before the step."""

    @abstractmethod
    def loss(self, model: PretrainingModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """The term over one micro-batch."""
