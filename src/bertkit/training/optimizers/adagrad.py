"""Adagrad: each weight's step is divided by the root of the sum of all its squared gradients.

Duchi et al. 2011, JMLR 12:2121, as in torch.optim.Adagrad; ELMo's released code (Peters et al. 2018,
arXiv:1802.05365) trains with a sum that starts at 1. Siblings forget old gradients; this one does not.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from bertkit.training.optimizers.base import OptimizerConfig


class AdagradConfig(OptimizerConfig):
    """Steps that shrink with the gradients seen so far."""

    name: Literal["adagrad"] = "adagrad"
    decay_is_decoupled: ClassVar[bool] = False
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty: share of the weight that is added to its gradient.")
    initial_sum: float = Field(1.0, ge=0, description="Initial sum of squares of each weight.")
    eps: float = Field(1e-10, gt=0, description="Epsilon added to the square root of the sum.")

    state_bytes: ClassVar[float] = 4.0

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.groups(model), lr=0.0, initial_accumulator_value=self.initial_sum, eps=self.eps)
