"""Which weights a fine-tuning run trains, and when: all, the head alone, from the top down, or low-rank updates.

Devlin et al. 2019, arXiv:1810.04805, sections 4 (full) and 5.3 (feature-based); Howard and Ruder 2018, ULMFiT,
arXiv:1801.06146, section 3.3 (gradual unfreezing); Hu et al. 2021, LoRA, arXiv:2106.09685, section 4. Layer-wise decay
of the rate, which any of them may have, is that of ELECTRA (Clark et al. 2020, arXiv:2003.10555, appendix B).

What comes out is a plain model whatever the method: LoRA's updates are added into the weights at the end.

Shapes: D width in, F width out, R rank.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.settings import Settings

_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")
_BELOW_ALL_LAYERS = ("embeddings", "embedding_norm", "word", "mask_emb", "projection")
"""Parts of an encoder that its first layer reads."""


class Method(Settings, ABC):
    """What is trained in which epoch."""

    @abstractmethod
    def is_trained(self, depth: int, epoch: int) -> bool:
        """Whether a parameter is trained.

        Args:
            depth: how many layers it lies below the head: 0 for head and pooler, 1 for the top layer, and so on down to
                the embeddings.
            epoch: counted from 0.
        """

    def prepare(self, model: HeadedModel, seed: int) -> None:
        """Add to the model what the method trains; weights are drawn by the seed."""
        return

    def finish(self, model: HeadedModel) -> None:
        """Make a plain model of it again."""
        return

    def set_trained(self, model: HeadedModel, epoch: int) -> None:
        """Let gradients flow to what this epoch trains."""
        depths = depth_below_head(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.is_trained(depths[name], epoch))


class Full(Method):
    """Every weight from the first step on."""

    name: Literal["full"] = "full"

    def is_trained(self, depth: int, epoch: int) -> bool:
        return True


class Frozen(Method):
    """The encoder stays as it is and computes without dropout; its pooler and the head learn."""

    name: Literal["frozen"] = "frozen"

    def is_trained(self, depth: int, epoch: int) -> bool:
        return depth == 0


class GradualUnfreezing(Method):
    """The head first, then more layers from the top down with every epoch, at last the embeddings."""

    name: Literal["gradual"] = "gradual"
    layers_per_epoch: int = Field(1, ge=1, description="Layers that each epoch adds.")

    def is_trained(self, depth: int, epoch: int) -> bool:
        return depth <= epoch * self.layers_per_epoch


class Lora(Method):
    """Low-rank updates of chosen linear maps, W + alpha / R * B A; the head learns with them, all else stays."""

    name: Literal["lora"] = "lora"
    rank: int = Field(8, ge=1, description="R.")
    alpha: float = Field(16.0, gt=0, description="The update's scale is alpha / rank.")
    targets: tuple[str, ...] = Field(
        ("query", "value"), description="Names of the linear maps that get an update: query, key, value, output, ..."
    )

    def is_trained(self, depth: int, epoch: int) -> bool:
        return depth == 0

    def set_trained(self, model: HeadedModel, epoch: int) -> None:
        super().set_trained(model, epoch)
        for part in model.modules():
            if isinstance(part, LowRankUpdate):
                part.requires_grad_(True)

    def prepare(self, model: HeadedModel, seed: int) -> None:
        found = self._targets(model)
        generator = torch.Generator().manual_seed(seed)
        for linear in found:
            update = LowRankUpdate(linear.weight, rank=self.rank, scale=self.alpha / self.rank, generator=generator)
            parametrize.register_parametrization(linear, "weight", update)

    def finish(self, model: HeadedModel) -> None:
        for part in model.modules():
            if isinstance(part, nn.Linear) and parametrize.is_parametrized(part, "weight"):
                parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)

    def _targets(self, model: HeadedModel) -> list[nn.Linear]:
        linear = {name: part for name, part in model.encoder.named_modules() if isinstance(part, nn.Linear)}
        found = [part for name, part in linear.items() if name.rpartition(".")[2] in self.targets]
        if not found:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            wanted = " or ".join(self.targets)
            raise UsageError(f"method.targets: the encoder has no linear map called {wanted}; it has {known}")
        return found


class LowRankUpdate(nn.Module):
    """W to W + scale * B A, with A drawn as torch draws a linear map's weight, and B zero, so that it begins at W.

    The sum is made anew in each forward pass, of weights and not of states, so there is no dropout inside it.
    """

    def __init__(self, weight_FD: Tensor, *, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = weight_FD.shape
        down_RD = torch.empty(rank, inputs)
        bound = 1 / math.sqrt(inputs)
        self.down_RD = nn.Parameter(down_RD.uniform_(-bound, bound, generator=generator).to(weight_FD.device))
        self.up_FR = nn.Parameter(torch.zeros(outputs, rank, device=weight_FD.device))
        self.scale = scale

    def forward(self, weight_FD: Tensor) -> Tensor:
        return weight_FD + self.scale * (self.up_FR @ self.down_RD)


AnyMethod = Annotated[Full | Frozen | GradualUnfreezing | Lora, Field(discriminator="name")]


def depth_below_head(model: HeadedModel) -> Mapping[str, int]:
    """How many layers each parameter lies below the head: head and pooler 0, top layer 1, first layer L, embeddings
    L + 1. Weights that several layers share, as ALBERT's, count as the top layer's, like a norm behind it."""
    numbers = {name: int(found[1]) if (found := _LAYER.match(name)) else None for name, _ in model.named_parameters()}
    layers = 1 + max((number for number in numbers.values() if number is not None), default=0)

    def depth(name: str, number: int | None) -> int:
        if not name.startswith("encoder."):
            return 0
        if number is not None:
            return layers - number
        return layers + 1 if name.split(".")[1] in _BELOW_ALL_LAYERS else 1

    return {name: depth(name, number) for name, number in numbers.items()}


def scale_rates(model: HeadedModel, optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Split the optimiser's groups so that a weight's rate is decay^depth of the head's (`lr_scale` of its group).

    The paper gives the decay alone. ELECTRA's code has one factor more below the head, XLNet's one fewer.
    """
    if decay == 1.0:
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    depths = depth_below_head(model)
    groups = []
    for group in optimizer.param_groups:
        by_depth: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_depth.setdefault(depths[names[parameter]], []).append(parameter)
        for depth, parameters in sorted(by_depth.items()):
            scale = group.get("lr_scale", 1.0) * decay**depth
            groups.append({**group, "params": parameters, "lr_scale": scale})
    optimizer.param_groups[:] = groups
