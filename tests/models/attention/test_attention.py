"""Attention's fast paths against the plain formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bertkit.data.batch import PackedSequences
from bertkit.models.attention import self_attention as attention
from bertkit.models.attention.rotary import RotaryTable
from bertkit.models.attention.self_attention import _FEW_KEYS, attend, fused_attention
from bertkit.models.attention.windows import sliding_window_attention
from bertkit.models.recorder import Scope

BF16 = {"atol": 0.04, "rtol": 0.04}
"""Scores, probabilities and means rounded to eight bits each, for values around one."""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def masks(sequences: int, length: int) -> dict[str, Tensor | None]:
    real_b = torch.arange(length) < torch.randint(1, length + 1, (sequences, 1))
    near = (torch.arange(length)[:, None] - torch.arange(length)).abs() <= 3
    return {
        "none": None,
        "keys": real_b[:, None, None],
        "near": near,
        "added": torch.where(near, drawn(sequences, 1, length, length, seed=9), -math.inf),
    }


def values_and_gradients(rows: list[Tensor], mask: Tensor | None, scale: float | None) -> list[Tensor]:
    """Shapes of queries, keys, values and the values' gradient."""
    query, key, value = (each.clone().requires_grad_() for each in rows[:3])
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    mixed = fused_attention(query, key, value, mask, scale=scale)
    return [mixed.detach(), *torch.autograd.grad(mixed, (query, key, value), rows[3])]


@pytest.mark.parametrize("each_side", [None, 1, 3, 30])
@pytest.mark.parametrize("are_hidden", [False, True])
@pytest.mark.parametrize("are_causal", [False, True])
def test_each_sequence_attends_as_in_the_plain_formula(
    each_side: int | None, are_hidden: bool, are_causal: bool
) -> None:
    """Some sequences are causal, and the last tokens of some are hidden from all others and from themselves."""
    lengths, keys = [23, 22, 9, 2, 1], np.array([23, 7, 1, 1, 1])
    causal_B = np.array([True, True, False, True, False]) if are_causal else None
    sequences = PackedSequences.from_lengths(lengths, causal_B=causal_B, keys_B=keys if are_hidden else None)
    heads = [drawn(sum(lengths), 2, 8, seed=seed) for seed in range(3)]
    scope = Scope(None, "")
    if each_side is None:
        found_TNH = attend(*heads, sequences, dropout_rate=0.0, scope=scope)
    else:
        found_TNH = sliding_window_attention(*heads, sequences, each_side=each_side, dropout_rate=0.0, scope=scope)
    parts = [torch.split(rows_TNH.transpose(0, 1), lengths, dim=1) for rows_TNH in heads]
    for number, (query, key, value, found) in enumerate(zip(*parts, torch.split(found_TNH, lengths), strict=True)):
        position = torch.arange(lengths[number])
        sees = torch.ones(len(position), len(position), dtype=torch.bool)
        if each_side is not None:
            sees &= (position[:, None] - position).abs() <= each_side
        if causal_B is not None and causal_B[number]:
            sees &= position <= position[:, None]
        if are_hidden:
            sees &= position < keys[number]
        sees |= torch.eye(len(position), dtype=torch.bool) & ~sees.any(dim=1, keepdim=True)
        scores = (query @ key.transpose(1, 2) / math.sqrt(8)).masked_fill(~sees, -math.inf)
        torch.testing.assert_close(found, (scores.softmax(dim=-1) @ value).transpose(0, 1))


@pytest.mark.parametrize("kind", ["none", "keys", "near", "added"])
@pytest.mark.parametrize("length", [1, 37, _FEW_KEYS, _FEW_KEYS + 1])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_bfloat16_gives_what_single_precision_gives(kind: str, length: int, scale: float | None) -> None:
    torch.manual_seed(2)
    mask = masks(3, length)[kind]
    half = [drawn(3, 2, length, 24, seed=seed).bfloat16() for seed in range(4)]
    expected = values_and_gradients([each.float() for each in half], mask, scale)
    found = values_and_gradients(half, mask, scale)
    for exact, rounded in zip(expected, found, strict=True):
        torch.testing.assert_close(rounded.float(), exact, **BF16)


def test_single_precision_is_torchs_kernel_to_the_bit() -> None:
    query, key, value = (drawn(2, 3, 19, 8, seed=seed) for seed in range(3))
    expected = functional.scaled_dot_product_attention(query, key, value)
    assert torch.equal(fused_attention(query, key, value, None), expected)


@pytest.mark.parametrize("kind", ["none", "keys", "near", "added"])
@pytest.mark.parametrize("sequences", [2, 5, 9])
def test_scores_part_by_part_are_those_of_the_block_to_the_bit(
    kind: str, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients, parts of two or more sequences are computed one after another."""
    torch.manual_seed(3)
    mask = masks(sequences, 37)[kind]
    query, key, value = (drawn(sequences, 2, 37, 24, seed=seed).bfloat16() for seed in range(3))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    whole = fused_attention(query.requires_grad_(), key, value, mask).detach()
    sizes = []
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda scores, **more: sizes.append(len(scores)) or softmax(scores, **more))
    monkeypatch.setattr(attention, "_SCORES_IN_CACHE", 3 * 2 * 37 * 37)
    with torch.inference_mode():
        assert torch.equal(fused_attention(query, key, value, mask), whole)
    assert sizes == {2: [2], 5: [5], 9: [3, 3, 3]}[sequences]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turning_back_is_the_gradient_of_turning(dtype: torch.dtype) -> None:
    """Against the formula of Su et al. 2021, equation 34, with autograd in double precision."""
    positions_T = torch.tensor([0, 1, 2, 0, 1, 511, 3])
    rows_TNH = drawn(7, 3, 10, seed=1).to(dtype)
    outer_TNH = drawn(7, 3, 10, seed=2).to(dtype)
    angle_T15 = positions_T.double()[:, None, None] / 100 ** (torch.arange(0, 10, 2).double() / 10)
    exact = rows_TNH.double().requires_grad_()
    first, second = exact.chunk(2, dim=-1)
    turned = torch.cat(
        [first * angle_T15.cos() - second * angle_T15.sin(), second * angle_T15.cos() + first * angle_T15.sin()], dim=-1
    )
    turned.backward(outer_TNH.double())
    leaf = rows_TNH.clone().requires_grad_()
    found = RotaryTable(positions_T, 10, 100.0).turn(leaf)
    found.backward(outer_TNH)
    assert exact.grad is not None
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.01, "rtol": 0.01}
    torch.testing.assert_close(found.double(), turned, **tolerance)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, **tolerance)


def test_the_kernels_own_dropout_keeps_the_mean_and_scales_what_is_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 7, 8, generator=generator) for _ in range(3))
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[1, ..., 4:] = False
    torch.manual_seed(0)
    draws = torch.stack([fused_attention(query, key, value, mask, dropout_rate=0.25) for _ in range(3000)])
    torch.testing.assert_close(draws.mean(dim=0), fused_attention(query, key, value, mask), rtol=0, atol=0.06)
    assert draws.std(dim=0).min() > 0.01
