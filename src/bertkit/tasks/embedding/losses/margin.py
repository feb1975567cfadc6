"""MarginMSE: match a cross-encoder's margin between the scores of a positive and a negative.

Hofstaetter et al. 2020, arXiv:2010.02666, section 3: squared error between the margin of the dot products and the
teacher's margin; the mean over negatives if there are several.

Shapes: I examples, A texts of each, E width, N = A - 2 negatives.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from bertkit.models.loss_sum import LossSum
from bertkit.tasks.embedding.losses.base import TaughtScoresLoss, mean_of


class MarginLoss(TaughtScoresLoss):
    """(u p - u n - margin)^2, of dot products."""

    name: Literal["margin"] = "margin"

    def of_scores(self, scores: Tensor, target: Tensor | None, text_IA: Tensor | None) -> LossSum:
        assert target is not None
        margins_IN = scores[:, :1] - scores[:, 1:]
        return mean_of(((margins_IN - target) ** 2).mean(dim=-1))
