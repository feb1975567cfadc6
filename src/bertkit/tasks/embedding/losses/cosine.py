"""Squared error of the cosine: the regression loss of SBERT.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084, section 3; the released CosineSimilarityLoss.py.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import nn

from bertkit.models.loss_sum import LossSum
from bertkit.models.similarity import Similarity
from bertkit.tasks.embedding.losses.base import EmbeddingLoss, TargetKind, TextVectors, cosine, mean_of, pair


class CosineLoss(EmbeddingLoss):
    """(cosine - score)^2."""

    name: Literal["cosine"] = "cosine"

    wanted: ClassVar[TargetKind | None] = "score"
    compares_bounded_scores: ClassVar[bool] = True

    @property
    def compared_by(self) -> Similarity | None:
        return "cosine"

    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        return mean_of((cosine(*pair(batch)) - batch.wanted) ** 2)
