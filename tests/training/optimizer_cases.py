"""Optimisers to test, models small enough to compare by hand, and updates with random gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from bertkit.models.families.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.training.optimizers import (
    AdafactorConfig,
    AdagradConfig,
    AdamConfig,
    AdamWConfig,
    LambConfig,
    MuonConfig,
    OptimizerConfig,
    StableAdamWConfig,
)

Weights = dict[str, np.ndarray]
Rule = Callable[[str, np.ndarray, np.ndarray, float], np.ndarray]
"""From name, weights, gradient and learning rate to the weights after an update."""
ALL: list[OptimizerConfig] = [
    AdamWConfig(),
    AdamWConfig(bias_correction=False),
    AdamConfig(),
    AdamConfig(bias_correction=False),
    LambConfig(),
    LambConfig(bias_correction=False, adapted="all"),
    AdafactorConfig(weight_decay=0.02),
    AdagradConfig(weight_decay=0.02),
    MuonConfig(),
    MuonConfig(adjustment="original", matrix_rate=7.0, iterations=3),
    StableAdamWConfig(),
]
BETAS = (0.8, 0.95)


def label(config: OptimizerConfig) -> str:
    changed = sorted(config.model_fields_set - {"name"})
    return "-".join([config.model_dump()["name"], *(f"{key}={getattr(config, key)}" for key in changed)])


class Tiny(nn.Module):
    """A matrix, a norm and a bias, of odd and unequal sizes; in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
        self.double()


def small_bert() -> HeadedModel:
    config = BertConfig(
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=9,
    )
    model = HeadedModel(config.build(31), ["masked_lm", "next_sentence"])
    model.initialise(3)
    return model


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def gradients_of(model: nn.Module, step: int) -> Weights:
    draw = np.random.default_rng(step)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {name: draw.normal(size=shape) * 10.0 ** draw.integers(-3, 2) for name, shape in shapes.items()}


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rate: float) -> None:
    gradients = gradients_of(model, step)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.as_tensor(gradients[name], dtype=parameter.dtype)
    set_rate(optimizer, rate)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def weights_of(model: nn.Module) -> Weights:
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def is_decayed(name: str) -> bool:
    return name == "map.weight"


class Moments:
    """Running means of gradient and square, corrected or not: the part shared by Adam and LAMB."""

    def __init__(self, *, correct: bool) -> None:
        self.first: Weights = {}
        self.second: Weights = {}
        self.steps: dict[str, int] = {}
        self.correct = correct

    def direction(self, name: str, gradient: np.ndarray, eps: float) -> np.ndarray:
        step = self.steps[name] = self.steps.get(name, 0) + 1
        self.first[name] = BETAS[0] * self.first.get(name, 0) + (1 - BETAS[0]) * gradient
        self.second[name] = BETAS[1] * self.second.get(name, 0) + (1 - BETAS[1]) * gradient**2
        over = [1 - beta**step if self.correct else 1.0 for beta in BETAS]
        return (self.first[name] / over[0]) / (np.sqrt(self.second[name] / over[1]) + eps)
