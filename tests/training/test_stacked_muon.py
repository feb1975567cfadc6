"""Stacked Muon equals torch's Muon: the same bits of weights and state for any stacked shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from bertkit.training.optimizers import stacked_muon
from bertkit.training.optimizers.stacked_muon import LARGEST_STACKED, StackedMuon, rate_factor

SHAPES = [(64, 64), (24, 8), (8, 24), (64, 64), (5, 7), (24, 8), (64, 64), (8, 24), (33, 17), (300, 260), (300, 260)]
"""Several of one shape, single ones, and two of one that is too large to be stacked."""


def matrices(shapes: Sequence[tuple[int, int]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(parameters: Sequence[nn.Parameter], step: int) -> None:
    """Equal gradients for equal shapes; the matrix of number `step` has none."""
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if number == step else gradient


@pytest.mark.parametrize(
    "settings",
    [
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.1},
        {"adjust_lr_fn": "original", "weight_decay": 0.0, "nesterov": False, "ns_steps": 2, "momentum": 0.8},
    ],
)
def test_stacks_have_the_results_of_torchs_muon(settings: dict[str, Any]) -> None:
    ours, theirs = matrices(SHAPES), matrices(SHAPES)
    stacked, plain = StackedMuon(ours, lr=0.02, **settings), torch.optim.Muon(theirs, lr=0.02, **settings)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        stacked.step()
        plain.step()
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(stacked.state[own]["momentum_buffer"], plain.state[other]["momentum_buffer"])
        # A processor without bfloat16 products may sum those of a stack in another order.
        assert torch.allclose(own, other, rtol=0, atol=0.02 * 4 * rate_factor(own.shape, settings["adjust_lr_fn"]) / 64)
    assert stacked.state_dict()["param_groups"] == plain.state_dict()["param_groups"]


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="this processor has no bfloat16 products of its own"
)
def test_with_bfloat16_instructions_they_are_the_same_bits() -> None:
    ours, theirs = matrices(SHAPES), matrices(SHAPES)
    stacked, plain = StackedMuon(ours, lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        stacked.step()
        plain.step()
    assert all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))


def test_a_stack_has_as_many_products_as_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    orthogonal = stacked_muon._orthogonal

    def counted(update: torch.Tensor, group: Any) -> torch.Tensor:
        calls.append(update.shape)
        return orthogonal(update, group)

    monkeypatch.setattr(stacked_muon, "_orthogonal", counted)
    parameters = matrices(SHAPES)
    give_gradients(parameters, step=-1)
    StackedMuon(parameters).step()
    large = [shape for shape in SHAPES if min(shape) > LARGEST_STACKED]
    assert sorted(map(tuple, calls)) == sorted([(3, 64, 64), (2, 24, 8), (2, 8, 24), (5, 7), (33, 17), *large])
