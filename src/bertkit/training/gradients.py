"""A micro-batch's part of an update's gradient: one forward and one backward pass.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4. Methods of fine-tuning replace it: FreeLB makes several passes
over perturbed word embeddings, Theseus randomly replaces layers. Each term's sum is divided by its count over the whole
batch, so the way a batch is split changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder

LossOf = Callable[[Recorder | None], Mapping[str, LossSum]]
"""Computes a micro-batch's terms in a forward pass with a recorder."""


@dataclass(frozen=True)
class TermScale:
    """A term's weight in the total, and its count in the whole batch."""

    weight: float
    count: int


class Gradient:
    """The plain gradient.

    Attributes:
        passes: number of forward and backward passes over each micro-batch.
    """

    passes = 1

    def add(self, loss: LossOf, batch: Any, scales: Mapping[str, TermScale], step: int) -> dict[str, LossSum]:
        """Add a micro-batch's part to the gradients of the weights; returns each term, detached, still on the device.

        Args:
            loss: the loss of the micro-batch.
            batch: the micro-batch, on the model's device.
            scales: the scale of each term.
            step: the update's number, from 0, for random draws.
        """
        losses = loss(None)
        backward(scaled_total(losses, scales))
        return detached(losses)


def detached(losses: Mapping[str, LossSum]) -> dict[str, LossSum]:
    """Each term without its graph."""
    return {term: part.detached() for term, part in losses.items()}


def scaled_total(losses: Mapping[str, LossSum], scales: Mapping[str, TermScale], passes: int = 1) -> Tensor:
    """A micro-batch's part of the total loss, divided by the number of passes."""
    means = [scales[term].weight * (part.sum / (scales[term].count * passes)) for term, part in losses.items()]
    return means[0] if len(means) == 1 else torch.stack(means).sum()


def backward(loss: Tensor) -> None:
    """Add the gradient of a scalar."""
    torch.autograd.backward(loss)
