"""The base of all optimisers: common settings, groups of weight decay, and state as tensors for a checkpoint.

The exclusions from weight decay are those of BERT's released optimization.py (Devlin et al. 2019, arXiv:1810.04805).
Siblings hold one update rule each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.settings import Settings


class OptimizerConfig(Settings, ABC):
    """An update rule. The step sets the schedule's learning rate in each group before every update."""

    weight_decay: float = Field(
        0.01, ge=0, description="Decay per step, times the learning rate; not on biases and norms."
    )
    clip_norm: float | None = Field(1.0, gt=0, description="Largest global norm of the gradient; null: no clipping.")

    @abstractmethod
    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The rule over all of the model's parameters, at a learning rate of 0.

        A group may have `lr_scale`, a factor of its learning rate.
        """


def decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters with and without weight decay: biases and norms have none; embeddings are decayed, as BERT's are."""
    norms = {name for name, part in model.named_modules() if isinstance(part, nn.LayerNorm)}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        (kept if kind == "bias" or owner in norms else decayed).append(parameter)
    return decayed, kept


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """torch's groups: first the parameters that are decayed, then those that are not."""
    decayed, kept = decay_groups(model)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


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
