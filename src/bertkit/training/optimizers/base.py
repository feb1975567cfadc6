"""The base of all optimisers: common settings, weight-decay groups, and state as tensors for a checkpoint.

The exclusions from weight decay are those of BERT's released optimization.py (Devlin et al. 2019, arXiv:1810.04805).
Siblings contain one update rule each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from bertkit.models.layers import NORMS
from bertkit.settings import Settings, UnreadKey

_Decay = Annotated[float, Field(ge=0, lt=1)]
Betas = tuple[_Decay, _Decay]
"""Decays of the running means of gradient and square."""


class OptimizerConfig(Settings, ABC):
    """An update rule. Before every update, the step sets the schedule's learning rate in each group."""

    weight_decay: float = Field(0.01, ge=0, description="Weight decay per step, times the learning rate.")
    decay_biases_and_norms: bool = Field(
        False, description="Whether weight decay also applies to biases and norms, as in fairseq's training loop."
    )
    decay_per_step: bool = Field(
        False,
        description="Whether weight_decay is what weights lose in an update at the schedule's peak, whatever the"
        " peak learning rate, and proportionally less at lower learning rates; otherwise it is multiplied by the"
        " learning rate.",
    )
    clip_norm: float | None = Field(1.0, gt=0, description="Maximum global norm of the gradient; null: no clipping.")

    later_fields: ClassVar[frozenset[str]] = frozenset({"decay_biases_and_norms", "decay_per_step"})
    decay_is_decoupled: ClassVar[bool] = True
    """Whether the decay is a share of the weight only, and so can be given per step."""

    @model_validator(mode="after")
    def _decay_has_an_effect(self) -> Self:
        if self.decay_per_step and not self.decay_is_decoupled:
            raise ValueError("decay_per_step needs decoupled weight decay, as in adamw; leave it out, or use adamw")
        return self

    def for_peak(self, peak: float) -> Self:
        """The same rule with a weight decay that is multiplied by the learning rate, regardless of the recipe's.

        Fully decoupled decay as in Composer's DecoupledAdamW and in optimi (decouple_lr): an update subtracts
        weight_decay * lr / peak of a weight.

        Args:
            peak: the schedule's peak.
        """
        if not self.decay_per_step:
            return self
        return self.model_copy(update={"weight_decay": self.weight_decay / peak, "decay_per_step": False})

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.weight_decay == 0:
            yield UnreadKey("decay_biases_and_norms", "optimizer.weight_decay is 0: nothing is decayed")
            yield UnreadKey("decay_per_step", "optimizer.weight_decay is 0: nothing is decayed")

    @property
    def width_power(self) -> float | None:
        """The power of the width by which the learning rate of a layer's matrices falls as a model gets wider
        (pretraining/width_transfer.py); None: no rule is known."""
        return None

    can_shard: ClassVar[bool] = True
    """Whether the rule works on parameters that are sharded over ranks (`engine.shard`)."""
    state_bytes: ClassVar[float] = 8.0
    """Bytes per parameter that the rule keeps between updates, for `--plan`: two moments in float32, at most."""

    def update_flops(self, model: nn.Module) -> float:
        """Floating-point operations of the matrix products in one update, for `--plan`; element-wise operations are too
        few to count."""
        return 0.0

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups for torch: matrices and embeddings, then biases and norms, each with its weight decay."""
        decayed, others = decay_groups(model)
        return [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": self.decay_of_others},
        ]

    @property
    def decay_of_others(self) -> float:
        """The weight decay of biases and norms."""
        return self.weight_decay if self.decay_biases_and_norms else 0.0

    @abstractmethod
    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The rule over all of the model's parameters, at a learning rate of 0.

        A group can have `lr_scale`, a factor of its learning rate.
        """


def decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices and embeddings, and biases and norms, which BERT excludes from weight decay."""
    norms = {name for name, part in model.named_modules() if isinstance(part, NORMS)}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        (kept if kind == "bias" or owner in norms else decayed).append(parameter)
    return decayed, kept


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as a mapping from `parameter:entry` to tensor, for a checkpoint."""
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


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """The return value of torch's `step`: the loss recomputed by a closure, with its gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
