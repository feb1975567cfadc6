"""CoSENT: the pairs of a batch are ranked by their cosines as by their scores.

Su 2022 (kexue.fm/archives/8847); Huang et al. 2024, CoSENT, IEEE/ACM TASLP 32. The loss of a batch is
log(1 + sum exp(scale (s_i - s_j))) over all pairs of its examples where the score of i is less than that of j. Only the
order of the scores matters, so any scale of them will do.

Shapes: I examples.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.models.loss_sum import LossSum
from bertkit.tasks.embedding.losses.base import EmbeddingLoss, TextVectors, Wanted, cosine, of_whole_batch, pair


class CosentLoss(EmbeddingLoss):
    """log(1 + sum exp(scale (s_i - s_j))) over pairs of examples that are ranked."""

    name: Literal["cosent"] = "cosent"
    scale: float = Field(20.0, gt=0, description="Factor of the cosines: the inverse of a temperature.")

    wanted: ClassVar[Wanted | None] = "score"
    compares_examples: ClassVar[bool] = True

    def count(self, examples: int) -> int:
        return 1

    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        return of_whole_batch(ranking_loss(self.scale * cosine(*pair(batch)), batch.wanted))


def ranking_loss(similarity_I: Tensor, score_I: Tensor) -> Tensor:
    """log(1 + sum of exp(similarity_i - similarity_j)) over all i, j with score_i < score_j."""
    difference_II = similarity_I[:, None] - similarity_I[None, :]
    ranked_M = difference_II[score_I[:, None] < score_I[None, :]]
    return torch.logsumexp(torch.cat([similarity_I.new_zeros(1), ranked_M]), dim=0)
