"""Adam with decoupled weight decay (adamw), and with L2 in the gradient (adam).

Loshchilov and Hutter 2019, arXiv:1711.05101, Algorithm 2 has both: the decay separate from the update, or in the
gradient, where the second moment divides it away for weights with large gradients. Kingma and Ba 2015, arXiv:1412.6980
(Adam). Bias correction can be left out, as in BERT's released optimization.py. Both use torch's fused kernels.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from bertkit.training.optimizers.base import Betas, OptimizerConfig

_LONG_AGO = 1 << 20
"""A step count at which both bias corrections are exactly 1 in double precision."""


class _AdamLike(OptimizerConfig):
    betas: Betas = Field(
        (0.9, 0.999), description="Decay rates of the running means of the gradient and of its square."
    )
    eps: float = Field(1e-6, gt=0, description="Epsilon added to the square root of the second moment.")
    bias_correction: bool = Field(
        True, description="Bias correction: correct the running means for their start at zero; BERT does not."
    )

    @property
    def width_power(self) -> float:
        return 1.0

    @abstractmethod
    def _kernel(self, groups: list[dict[str, Any]]) -> torch.optim.Adam:
        """torch's class over these groups."""

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """torch's fused kernel over the model's parameters, decayed ones first.

        Without bias correction, the update is that of a run in which the correction has long worn off, so the step
        count starts high: torch's fused kernel has no switch for it. With beta = 0.999, 1 - beta^(2^20) rounds to 1.
        """
        optimizer = self._kernel(self.groups(model))
        if not self.bias_correction:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(_LONG_AGO), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        return optimizer


class AdamWConfig(_AdamLike):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"] = "adamw"

    def _kernel(self, groups: list[dict[str, Any]]) -> torch.optim.Adam:
        return torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.eps, fused=True)


class AdamConfig(_AdamLike):
    """Adam with coupled weight decay: L2 regularisation, which papers call "Adam" with "L2 weight decay"."""

    name: Literal["adam"] = "adam"
    decay_is_decoupled: ClassVar[bool] = False
    weight_decay: float = Field(
        0.01, ge=0, description="L2 penalty: share of the weight that is added to its gradient."
    )

    def _kernel(self, groups: list[dict[str, Any]]) -> torch.optim.Adam:
        return torch.optim.Adam(groups, lr=0.0, betas=self.betas, eps=self.eps, fused=True)
