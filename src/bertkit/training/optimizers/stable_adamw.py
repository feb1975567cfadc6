"""StableAdamW: AdamW that lowers the learning rate of a tensor when its second moment lags behind the gradient.

Wortsman et al. 2023, arXiv:2304.13013, algorithm 2: AdamW with the update clipping of Adafactor (Shazeer and Stern
2018, arXiv:1804.04235, section 5), which replaces gradient clipping. ModernBERT's optimiser (Warner et
al. 2024, arXiv:2412.13663, section 2.2), there from the library optimi. Sibling adam.py has no such bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.training.optimizers.base import Betas, OptimizerConfig, loss_of


class StableAdamWConfig(OptimizerConfig):
    """AdamW with update clipping; the gradient is not clipped."""

    name: Literal["stable-adamw"] = "stable-adamw"
    betas: Betas = Field((0.9, 0.99), description="Decay rates of the running means of the gradient and of its square.")
    eps: float = Field(1e-6, gt=0, description="Epsilon added to the square root of the second moment.")
    clip_norm: float | None = Field(
        None, gt=0, description="Maximum global norm of the gradient; null: no clipping, since updates are clipped."
    )

    @property
    def width_power(self) -> float:
        return 1.0

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return StableAdamW(self.groups(model), betas=self.betas, eps=self.eps)


class StableAdamW(torch.optim.Optimizer):
    """Update t of a parameter x with gradient g, with b = beta (1 - beta^(t-1)) / (1 - beta^t) for each beta:

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
        RMS = sqrt(mean(g^2 / max(v, eps^2))),  r = lr / max(1, RMS)
        x = x - r (m / (sqrt(v) + eps) + weight_decay x)

    This form includes the bias correction of the moments; RMS is over a whole tensor.

    Args:
        groups: parameter groups, each with `weight_decay`.
        betas: of m and v.
        eps: added to the root.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's own
        loss = loss_of(closure)
        for group in self.param_groups:
            by_step: dict[int, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_step[self._count(parameter)].append(parameter)
            for number, parameters in by_step.items():
                self._update(parameters, number, group)
        return loss

    def _update(self, parameters: list[Tensor], number: int, group: dict[str, Any]) -> None:
        first_beta, second_beta = (beta * (1 - beta ** (number - 1)) / (1 - beta**number) for beta in group["betas"])
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        first, second = ([self.state[parameter][key] for parameter in parameters] for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(first, gradients, 1 - first_beta)
        torch._foreach_mul_(second, second_beta)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - second_beta)
        ratios = torch._foreach_div(gradients, torch._foreach_clamp_min(torch._foreach_sqrt(second), group["eps"]))
        rms = [ratio.square_().mean().sqrt().clamp_min(1.0) for ratio in ratios]
        roots = torch._foreach_sqrt(second)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(first, roots)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        torch._foreach_div_(updates, rms)
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _count(self, parameter: Tensor) -> int:
        """The number of this update of a parameter, from 1; its state is created at the first."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float64)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] = state["step"].cpu() + 1  # the host reads it at every update
        return int(state["step"])
