"""Triplet loss: the positive must be nearer to the anchor than the negative, by a margin.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084, section 3: max(|a - p| - |a - n| + margin, 0), Euclidean,
margin 1; the released TripletLoss.py has the margin 5, as here.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn
from torch.nn import functional

from bertkit.models.loss_sum import LossSum
from bertkit.tasks.embedding.losses.base import Distance, EmbeddingLoss, TextVectors, distance, mean_of


class TripletLoss(EmbeddingLoss):
    """max(distance to the positive - distance to the negative + margin, 0)."""

    name: Literal["triplet"] = "triplet"
    distance: Distance = Field("euclidean", description="Distance function for two vectors.")
    margin: float = Field(5.0, ge=0, description="Margin by which the positive must be nearer than the negative.")

    texts: ClassVar[tuple[int, int | None]] = (3, 3)

    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        anchor_IE, positive_IE, negative_IE = batch.vectors_IAE.unbind(dim=1)
        to_positive_I = distance(self.distance, anchor_IE, positive_IE)
        to_negative_I = distance(self.distance, anchor_IE, negative_IE)
        return mean_of(functional.relu(to_positive_I - to_negative_I + self.margin))
