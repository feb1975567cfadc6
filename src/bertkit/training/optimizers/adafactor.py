"""Adafactor: keeps only the row and column means of a matrix's second moments.

Shazeer and Stern 2018, arXiv:1804.04235, as in torch.optim.Adafactor: no first moment, and steps relative to the size
of the weights. Siblings keep two numbers per weight; this one keeps almost none.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from bertkit.training.optimizers.base import OptimizerConfig


class AdafactorConfig(OptimizerConfig):
    """Factored second moments; a step is the learning rate, at most 1/sqrt(step), times the weights' RMS."""

    name: Literal["adafactor"] = "adafactor"
    weight_decay: float = Field(
        0.0, ge=0, description="Weight decay per step, times the learning rate; not on biases and norms."
    )
    beta2_decay: float = Field(-0.8, lt=0, description="The running mean's newest square has weight step^beta2_decay.")
    eps1: float | None = Field(
        None, gt=0, description="Lower bound of the square root of a second moment; null: the data type's epsilon."
    )
    eps2: float = Field(1e-3, ge=0, description="Lower bound of the weights' root mean square.")
    clip_threshold: float = Field(1.0, ge=1, description="Root mean square above which an update is scaled down.")

    can_shard: ClassVar[bool] = False
    state_bytes: ClassVar[float] = 0.0
    """Two vectors per matrix."""

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        # Empty parameters have no root mean square: torch would divide by zero.
        groups = [
            {**group, "params": [parameter for parameter in group["params"] if parameter.numel()]}
            for group in self.groups(model)
        ]
        return torch.optim.Adafactor(
            groups,
            lr=0.0,
            beta2_decay=self.beta2_decay,
            eps=(self.eps1, self.eps2),
            d=self.clip_threshold,
        )
