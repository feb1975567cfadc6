"""LAMB: Adam's update, scaled to the norm of the weights.

You et al. 2020, arXiv:1904.00962, Algorithm 2, with the identity as its scaling function. The differences between the
paper and the released code of LAMB and of ALBERT (Lan et al. 2020, arXiv:1909.11942; lamb_optimizer.py) are settings:
no bias correction, and no trust ratio if there is no decay. Sibling adam.py has the update without the ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.training.optimizers.base import Betas, OptimizerConfig, loss_of


class LambConfig(OptimizerConfig):
    """Layer-wise adaptive moments, for large batches; ALBERT's: bias_correction: false."""

    name: Literal["lamb"] = "lamb"
    decay_is_decoupled: ClassVar[bool] = False
    betas: Betas = Field(
        (0.9, 0.999), description="Decay rates of the running means of the gradient and of its square."
    )
    eps: float = Field(1e-6, gt=0, description="Epsilon added to the square root of the second moment.")
    bias_correction: bool = Field(
        True, description="Bias correction: correct the running means for their start; ALBERT does not."
    )
    adapted: Literal["decayed", "all"] = Field(
        "decayed",
        description="Parameters with a trust ratio: all except biases and norms, as in the released code, or all.",
    )

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        decayed, kept = self.groups(model)
        groups = [{**decayed, "adapted": True}, {**kept, "adapted": self.adapted == "all"}]
        return Lamb(groups, betas=self.betas, eps=self.eps, bias_correction=self.bias_correction)


class Lamb(torch.optim.Optimizer):
    """One update of a parameter x with gradient g and bias corrections c1 and c2 (1 if disabled):

        m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
        u = (m / c1) / (sqrt(v / c2) + eps) + weight_decay x
        x = x - lr * |x| / |u| * u

    if both norms are positive and the group is adapted; otherwise the ratio is 1. A layer is one tensor.

    Args:
        groups: parameter groups, each with `weight_decay` and `adapted`.
        betas: of m and v.
        eps: added to the root.
        bias_correction: whether c1 and c2 are 1 - beta^t.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], *, betas: tuple[float, float], eps: float, bias_correction: bool
    ) -> None:
        defaults = {"lr": 0.0, "betas": betas, "eps": eps, "bias_correction": bias_correction}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's own
        loss = loss_of(closure)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        states = [self._state_of(parameter) for parameter in parameters]
        steps, first, second = ([state[key] for state in states] for key in ("step", "exp_avg", "exp_avg_sq"))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(second)
        if group["bias_correction"]:
            torch._foreach_div_(roots, [(1 - beta2**step).sqrt() for step in steps])
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(first, roots)
        if group["bias_correction"]:
            torch._foreach_div_(updates, [1 - beta1**step for step in steps])
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if group["adapted"]:
            norms = zip(torch._foreach_norm(parameters), torch._foreach_norm(updates), strict=True)
            torch._foreach_mul_(updates, [_trust_ratio(weight, update) for weight, update in norms])
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            # Double, since 1 - beta^t is a small difference; on the parameter's device, to avoid synchronising.
            state["step"] = torch.zeros((), dtype=torch.float64, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _trust_ratio(weight_norm: Tensor, update_norm: Tensor) -> Tensor:
    """|x| / |u|, and 1 if either is zero, so that a weight that starts at zero can change."""
    return torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
