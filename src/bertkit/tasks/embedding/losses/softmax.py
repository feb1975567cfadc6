"""Softmax over a concatenation of both vectors: SBERT's loss for natural language inference.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084, section 3, and table 6 for the concatenations. The linear
map has no bias in the paper's formula; the released SoftmaxLoss.py has one, as here.

Shapes: I examples, E width, K labels.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.operators.matmul import Linear
from bertkit.tasks.embedding.losses.base import EmbeddingLoss, TargetKind, TextVectors, pair

Part = Literal["u", "v", "|u-v|", "u*v"]


class SoftmaxLoss(EmbeddingLoss):
    """Cross-entropy of the class, from a linear map of the concatenated parts; the map is dropped after training."""

    name: Literal["softmax"] = "softmax"
    parts: tuple[Part, ...] = Field(
        ("u", "v", "|u-v|"),
        min_length=1,
        description="Combinations of the two vectors u and v to concatenate: u, v, |u-v|, u*v.",
    )

    has_accuracy: ClassVar[bool] = True
    wanted: ClassVar[TargetKind | None] = "class"
    of_parts: ClassVar[bool] = False

    def module(self, width: int, labels: int, model: HeadedModel | None = None) -> nn.Module:
        return Linear(len(self.parts) * width, labels)

    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        assert module is not None
        u_IE, v_IE = pair(batch)
        known: dict[Part, Tensor] = {"u": u_IE, "v": v_IE, "|u-v|": (u_IE - v_IE).abs(), "u*v": u_IE * v_IE}
        logits_IK = module(torch.cat([known[part] for part in self.parts], dim=-1))
        return LossSum.cross_entropy(logits_IK, batch.wanted)
