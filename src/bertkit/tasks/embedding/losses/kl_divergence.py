"""KL divergence: match a cross-encoder's distribution over an example's texts.

Santhanam et al. 2022, ColBERTv2, arXiv:2112.01488, section 3.2; before, Lin et al. 2020, arXiv:2010.11386. The scores
of the positive and the negatives become probabilities by a softmax, and so do the teacher's. The teacher's margins
suffice, since a softmax does not change if a constant is added to all scores. As in the released colbert/training, the
divergence is averaged over examples; as in sentence-transformers' MultiVectorDistillKLDivLoss, it is multiplied by the
square of the temperature.

Shapes: I examples, A texts of each, E width, N = A - 1 texts besides the anchor.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from bertkit.models.loss_sum import LossSum
from bertkit.tasks.embedding.losses.base import TaughtScoresLoss, mean_of


class KlDivergenceLoss(TaughtScoresLoss):
    """KL(teacher || student) over the positive and the negatives, of dot products or of late interaction."""

    name: Literal["kl_divergence"] = "kl_divergence"
    temperature: float = Field(1.0, gt=0, description="Scores are divided by this, the teacher's and the model's own.")

    def of_scores(self, scores: Tensor, target: Tensor | None, text_IA: Tensor | None) -> LossSum:
        assert target is not None
        teacher_IN = torch.cat([target.new_zeros(target.shape[0], 1), -target], dim=1)
        own, taught = ((each.float() / self.temperature).log_softmax(dim=-1) for each in (scores, teacher_IN))
        divergence_IN = functional.kl_div(own, taught, reduction="none", log_target=True)
        return mean_of(divergence_IN.sum(dim=-1) * self.temperature**2)
