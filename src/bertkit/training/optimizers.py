"""Optimisers: torch's own, set up as the papers' code had them.

Loshchilov and Hutter 2019, arXiv:1711.05101 (decoupled weight decay); the exclusions and the missing bias correction
are those of BERT's released optimization.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.settings import Settings

_LONG_AGO = 1 << 20
"""A step count at which both bias corrections have become exactly 1 in double precision."""


class AdamWConfig(Settings):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"] = "adamw"
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of the running means of gradient and square.")
    eps: float = Field(1e-6, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.01, ge=0, description="Decay per step, times the rate; not on biases and norms.")
    bias_correction: bool = Field(True, description="Correct the running means for their start at zero; BERT does not.")
    clip_norm: float | None = Field(1.0, gt=0, description="Largest global norm of the gradient; null: no clipping.")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """torch's fused AdamW over the model's parameters, decayed ones first.

        Without bias correction the update is that of a run in which the correction has long worn off, so the step count
        starts high: torch's fused kernel has no switch for it. With beta = 0.999, 1 - beta^(2^20) rounds to 1.
        """
        decayed, kept = decay_groups(model)
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": self.weight_decay}, {"params": kept, "weight_decay": 0.0}],
            lr=0.0,
            betas=self.betas,
            eps=self.eps,
            fused=True,
        )
        if not self.bias_correction:
            for parameter in decayed + kept:
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(_LONG_AGO), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        return optimizer


AnyOptimizerConfig = Annotated[AdamWConfig, Field()]


def decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters with and without weight decay: biases and norms have none; embeddings are decayed, as BERT's are."""
    norms = {name for name, part in model.named_modules() if isinstance(part, nn.LayerNorm)}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        (kept if kind == "bias" or owner in norms else decayed).append(parameter)
    return decayed, kept


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as `parameter:entry` to tensor, for a checkpoint."""
    return {
        f"{name}:{entry}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state[parameter].items()
    }


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, entry = key.rpartition(":")
        parameter = parameters[name]
        optimizer.state[parameter][entry] = value.clone().to(parameter.device)
