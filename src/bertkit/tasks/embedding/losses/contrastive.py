"""Contrastive losses on pairs that belong together or do not.

Hadsell et al. 2006, CVPR. The online form, which is only in the released OnlineContrastiveLoss.py, uses the hard pairs
of a batch: positives that are farther apart than the nearest negative, and negatives that are nearer than the farthest
positive.

Shapes: I examples.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from bertkit.models.loss_sum import LossSum
from bertkit.tasks.embedding.losses.base import (
    Distance,
    EmbeddingLoss,
    TargetKind,
    TextVectors,
    distance,
    mean_of,
    of_whole_batch,
    pair,
)


class ContrastiveLoss(EmbeddingLoss):
    """(y d^2 + (1 - y) max(margin - d, 0)^2) / 2, with score y and distance d."""

    name: Literal["contrastive"] = "contrastive"
    distance: Distance = Field("cosine", description="Distance function for two vectors.")
    margin: float = Field(
        0.5, ge=0, description="Distance beyond which a pair that does not belong together adds no loss."
    )

    wanted: ClassVar[TargetKind | None] = "score"
    compares_bounded_scores: ClassVar[bool] = True

    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        distance_I = distance(self.distance, *pair(batch))
        apart_I = functional.relu(self.margin - distance_I)
        return mean_of(0.5 * (batch.wanted * distance_I**2 + (1 - batch.wanted) * apart_I**2))


class OnlineContrastiveLoss(EmbeddingLoss):
    """The sum of d^2 over hard positives and max(margin - d, 0)^2 over hard negatives; scores other than 0 and 1 are
    ignored."""

    name: Literal["online_contrastive"] = "online_contrastive"
    distance: Distance = Field("cosine", description="Distance function for two vectors.")
    margin: float = Field(
        0.5, ge=0, description="Distance beyond which a pair that does not belong together adds no loss."
    )

    wanted: ClassVar[TargetKind | None] = "score"
    compares_examples: ClassVar[bool] = True
    compares_bounded_scores: ClassVar[bool] = True

    def count(self, examples: int) -> int:
        return 1

    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        distance_I = distance(self.distance, *pair(batch))
        together_M, apart_M = distance_I[batch.wanted == 1], distance_I[batch.wanted == 0]
        hard_apart_M = apart_M[apart_M < _or_mean(together_M.max() if together_M.numel() else None, apart_M)]
        hard_together_M = together_M[together_M > _or_mean(apart_M.min() if apart_M.numel() else None, together_M)]
        apart = functional.relu(self.margin - hard_apart_M).pow(2).sum()
        return of_whole_batch(hard_together_M.pow(2).sum() + apart)


def _or_mean(bound: Tensor | None, own_M: Tensor) -> Tensor:
    """The bound set by the other kind of pairs, or the mean of its own if there are no others."""
    return own_M.mean() if bound is None else bound
