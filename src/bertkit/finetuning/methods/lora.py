"""Low-rank updates of chosen linear maps.

Hu et al. 2021, LoRA, arXiv:2106.09685, section 4. The result is a plain model: the updates are merged into the
weights at the end. A model of one task also has them in its subdirectory `adapter`, as an adapter of PEFT.

Shapes: D width in, F width out, R rank.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bertkit.errors import UsageError
from bertkit.models.files.adapter_writing import LowRank
from bertkit.models.headed import HeadedModel
from bertkit.training.method import Method, TrainingData


class Lora(Method):
    """Low-rank updates of chosen linear maps, W + alpha / R * B A; the head is trained too, all else is frozen."""

    name: Literal["lora"] = "lora"
    rank: int = Field(8, ge=1, description="Rank r of the updates.")
    alpha: float = Field(16.0, gt=0, description="Alpha: updates are scaled by alpha / rank.")
    targets: tuple[str, ...] = Field(
        ("query", "value"), description="Names of the linear maps that are adapted: query, key, value, output, ..."
    )

    def is_trained(self, depth: int, epoch: int) -> bool:
        return depth == 0

    def set_trained(self, model: HeadedModel, epoch: int) -> None:
        super().set_trained(model, epoch)
        for part in model.modules():
            if isinstance(part, LowRankUpdate):
                part.requires_grad_(True)

    def prepare(self, model: HeadedModel, seed: int, data: TrainingData | None = None) -> HeadedModel:
        generator = torch.Generator().manual_seed(seed)
        for linear in self._targets(super().prepare(model, seed)):
            update = LowRankUpdate(linear.weight, rank=self.rank, scale=self.alpha / self.rank, generator=generator)
            parametrize.register_parametrization(linear, "weight", update)
        return model

    def finish(self, model: HeadedModel) -> None:
        for part in model.modules():
            if isinstance(part, nn.Linear) and parametrize.is_parametrized(part, "weight"):
                parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)

    def updates(self, model: HeadedModel) -> dict[str, LowRank]:
        """The updates of a model that is not finished yet, by the name of the weight."""
        adapted = ((name, part) for name, part in model.named_modules() if parametrize.is_parametrized(part, "weight"))
        lists = {f"{name}.weight": part.parametrizations.weight for name, part in adapted}
        return {name: LowRank(each.up_FR, each.down_RD) for name, (each,) in lists.items()}

    def _targets(self, model: HeadedModel) -> list[nn.Linear]:
        linear = {name: part for name, part in model.encoder.named_modules() if isinstance(part, nn.Linear)}
        known = {name.rpartition(".")[2] for name in linear}
        if unknown := [name for name in self.targets if name not in known]:
            others = f"it has {', '.join(sorted(known))}" if known else "it has none, so use another method"
            raise UsageError(f"method.targets: the encoder has no linear map named {' or '.join(unknown)}; {others}")
        return [part for name, part in linear.items() if name.rpartition(".")[2] in self.targets]


class LowRankUpdate(nn.Module):
    """Maps W to W + scale * B A; A is initialised like the weight of torch's linear layer, B with zeros.

    The update is added to the weight, not to states, so it has no dropout.
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
