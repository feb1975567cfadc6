"""How a micro-batch adds to the gradient of an update: one pass forward and one back.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4. Sibling methods/freelb.py passes several times, over perturbed
words; aims.py says what the terms of the loss are. Each term's sum is divided by its count over the whole batch, so
that how a batch is cut changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder
from bertkit.tasks.base import TaskBatch
from bertkit.training.step import TermTotal

Parts = Mapping[str, LossSum]
"""What each term of the loss comes to, by its name."""
LossOf = Callable[[Recorder | None], Parts]
"""A micro-batch's terms, from a forward pass under a recorder."""


@dataclass(frozen=True)
class Share:
    """What a term's sum is to the total: its weight, and its count over the whole batch."""

    weight: float
    count: int


class Gradient:
    """The plain gradient.

    Attributes:
        passes: forward and backward over each micro-batch.
    """

    passes = 1

    def add(self, loss: LossOf, batch: TaskBatch, shares: Mapping[str, Share], step: int) -> dict[str, TermTotal]:
        """Add a micro-batch's share to the gradients of the weights.

        Args:
            loss: of the micro-batch.
            batch: the micro-batch, where the model is.
            shares: of each term.
            step: number of the update, from 0, for what is drawn at random.

        Returns:
            The micro-batch's own total of each term.
        """
        parts = loss(None)
        backward(total_of(parts, shares))
        return {term: TermTotal.of(part) for term, part in parts.items()}


def total_of(parts: Parts, shares: Mapping[str, Share], passes: int = 1) -> Tensor:
    """A micro-batch's part of the total loss; of one in so many passes, its part of their mean."""
    means = [shares[term].weight * (part.sum / (shares[term].count * passes)) for term, part in parts.items()]
    return means[0] if len(means) == 1 else torch.stack(means).sum()


def backward(loss: Tensor) -> None:
    """Add the gradient of a scalar."""
    torch.autograd.backward(loss)
