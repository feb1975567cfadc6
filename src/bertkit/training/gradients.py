"""How a micro-batch adds to the gradient of an update: one pass forward and one back.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4. Sibling methods/freelb.py passes several times, over perturbed
words. Sums are divided by the count of the whole batch, so that how a batch is cut changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bertkit.models.recorder import Recorder
from bertkit.objectives.base import LossSum
from bertkit.tasks.base import TaskBatch
from bertkit.training.step import TermTotal

LossOf = Callable[[Recorder | None], LossSum]
"""A micro-batch's loss, from a forward pass under a recorder."""


class Gradient:
    """The plain gradient.

    Attributes:
        passes: forward and backward over each micro-batch.
    """

    passes = 1

    def add(self, loss: LossOf, batch: TaskBatch, count: int, step: int) -> TermTotal:
        """Add a micro-batch's share to the gradients of the weights.

        Args:
            loss: of the micro-batch.
            batch: the micro-batch, where the model is.
            count: predictions of the whole batch, by which sums are divided.
            step: number of the update, from 0, for what is drawn at random.

        Returns:
            The micro-batch's own total.
        """
        part = loss(None)
        backward(part.sum / count)
        return TermTotal(float(part.sum.detach()), part.count, int(part.correct))


def backward(loss: Tensor) -> None:
    """Add the gradient of a scalar."""
    torch.autograd.backward(loss)
