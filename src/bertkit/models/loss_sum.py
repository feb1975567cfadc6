"""A loss as a sum and a count, never a mean: the training step divides once, however the batch is split.

Not from a paper. Returned by objectives, tasks and distillation terms. operators/vocabulary.py computes the loss of
words.

Shapes: M predictions, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.nn import functional

from bertkit.models.operators.vocabulary import VocabularyProjection


@dataclass(frozen=True)
class LossSum:
    """One loss term over one micro-batch.

    Attributes:
        sum: summed loss in nats, a scalar that carries the gradient.
        count: number of predictions.
        correct: number of correct predictions, a scalar without gradient.
        counters: other counts of predictions, by name, scalars without gradient; `Objective.figures` reads their sums.
    """

    sum: Tensor
    count: int
    correct: Tensor
    counters: Mapping[str, Tensor] = field(default_factory=dict)

    def detached(self) -> LossSum:
        """The same numbers, detached from the graph."""
        return replace(self, sum=self.sum.detach())

    @classmethod
    def of_words(
        cls,
        projection: VocabularyProjection,
        id_M: Tensor,
        *,
        z_loss: float = 0.0,
        weight_M: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> LossSum:
        """Cross-entropy of the word of each prediction, without keeping the logits; see `VocabularyProjection`."""
        loss, correct = projection.cross_entropy(
            id_M, z_loss=z_loss, weight_M=weight_M, label_smoothing=label_smoothing
        )
        return cls(loss, id_M.numel(), correct)

    @classmethod
    def cross_entropy(cls, logits_MK: Tensor, label_M: Tensor) -> LossSum:
        """Cross-entropy over K classes, in nats, computed in float32; correct if the label's logit is the largest.

        Args:
            logits_MK: logits in any floating-point type.
            label_M: class of each prediction.
        """
        logits_MK = logits_MK.float()
        loss = functional.cross_entropy(logits_MK, label_M, reduction="sum")
        correct = (logits_MK.detach().argmax(dim=-1) == label_M).sum()
        return cls(loss, label_M.numel(), correct)
