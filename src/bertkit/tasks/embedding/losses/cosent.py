"""CoSENT: the cosines of a batch's pairs are trained to rank them as their scores do.

Su 2022 (kexue.fm/archives/8847); Huang et al. 2024, CoSENT, IEEE/ACM TASLP 32. The loss of a batch is
log(1 + sum exp(scale (s_i - s_j))) over all pairs of its examples where the score of i is less than that of j. Only the
order of the scores matters, so their scale is arbitrary. Sibling angle.py ranks another similarity.

Shapes: I examples.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.models.loss_sum import LossSum
from bertkit.models.similarity import Similarity
from bertkit.tasks.embedding.losses.base import EmbeddingLoss, TargetKind, TextVectors, cosine, of_whole_batch, pair


class RankingLoss(EmbeddingLoss):
    """log(1 + sum exp(scale (s_i - s_j))) over the ranked pairs of a batch's examples, with similarity s."""

    scale: float = Field(20.0, gt=0, description="Scale of the similarities: the inverse of a temperature.")

    wanted: ClassVar[TargetKind | None] = "score"
    compares_examples: ClassVar[bool] = True

    @property
    def compared_by(self) -> Similarity | None:
        return "cosine"

    def count(self, examples: int) -> int:
        return 1

    @abstractmethod
    def similarity(self, first_IE: Tensor, second_IE: Tensor) -> Tensor:
        """The similarity of each pair of vectors, (I,)."""

    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        return of_whole_batch(ranking_loss(self.scale * self.similarity(*pair(batch)), batch.wanted))


class CosentLoss(RankingLoss):
    """Ranking by cosines."""

    name: Literal["cosent"] = "cosent"

    def similarity(self, first_IE: Tensor, second_IE: Tensor) -> Tensor:
        return cosine(first_IE, second_IE)


def ranking_loss(similarity_I: Tensor, score_I: Tensor) -> Tensor:
    """log(1 + sum of exp(similarity_i - similarity_j)) over all i, j with score_i < score_j."""
    difference_II = similarity_I[:, None] - similarity_I[None, :]
    ranked_M = difference_II[score_I[:, None] < score_I[None, :]]
    return torch.logsumexp(torch.cat([similarity_I.new_zeros(1), ranked_M]), dim=0)
