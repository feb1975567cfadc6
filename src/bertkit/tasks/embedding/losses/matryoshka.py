"""Matryoshka: the loss is also computed on leading dimensions of the vectors, so that vectors can be truncated.

Kusupati et al. 2022, Matryoshka Representation Learning, arXiv:2205.13147, section 3: the weighted sum of one loss over
several widths. As in the released MatryoshkaLoss.py, truncated vectors are scaled to length one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import gt

from pydantic import Field, model_validator
from torch import nn

from bertkit.errors import UsageError
from bertkit.models.loss_sum import LossSum
from bertkit.settings import Settings
from bertkit.tasks.embedding.losses.base import EmbeddingLoss, TextVectors, unit


class Matryoshka(Settings):
    """The widths at which the loss is computed."""

    widths: tuple[int, ...] = Field(
        min_length=1, description="Numbers of leading dimensions, the largest first, such as [384, 128, 32]."
    )
    weights: tuple[float, ...] | None = Field(None, description="Weight of the loss at each width (default: 1 each).")

    @model_validator(mode="after")
    def _fits(self) -> Matryoshka:
        if self.widths[-1] < 1 or not all(map(gt, self.widths, self.widths[1:])):
            raise ValueError(f"widths: {list(self.widths)}: expected positive whole numbers in decreasing order")
        weights = self.weights
        if weights is not None and (len(weights) != len(self.widths) or min(weights) < 0):
            raise ValueError(f"weights: expected {len(self.widths)} numbers of at least 0, one per width")
        return self

    def check(self, loss: EmbeddingLoss, width: int) -> None:
        """Check the widths.

        Raises:
            UsageError: the vectors are narrower, or the loss needs whole vectors.
        """
        if self.widths[0] > width:
            raise UsageError(f"embedding.matryoshka.widths: {self.widths[0]} is more than the vectors' width, {width}")
        if not loss.of_parts:
            name = getattr(loss, "name", "")
            raise UsageError(f"embedding.matryoshka: the loss {name} needs whole vectors; leave matryoshka out")

    def loss(self, loss: EmbeddingLoss, batch: TextVectors, module: nn.Module | None) -> LossSum:
        """The weighted sum of the loss over the widths."""
        parts = [
            loss.loss(replace(batch, vectors_IAE=unit(batch.vectors_IAE[..., :width])), module) for width in self.widths
        ]
        weights: Sequence[float] = self.weights or (1.0,) * len(parts)
        total = sum(weight * part.sum for weight, part in zip(weights, parts, strict=True))
        return LossSum(total, parts[0].count, parts[0].correct)  # type: ignore[arg-type]  # sum of tensors, at least one
