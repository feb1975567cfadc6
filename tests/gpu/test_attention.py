"""torch's kernel for packed sequences against rectangles, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.models.attention import varlen
from bertkit.models.attention.projection import project_at_once, project_separately
from bertkit.models.attention.self_attention import attend, causal
from bertkit.models.attention.windows import sliding_window_attention
from bertkit.models.encoder import initialise
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.recorder import Scope
from tests.gpu.device import GPU, needs_gpu

pytestmark = needs_gpu

LENGTHS = [5, 117, 1, 64, 117, 212]
BF16 = {"rtol": 0.04, "atol": 0.04}
"""Eight bits of mantissa, for values around one."""


def drawn_heads() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(GPU).manual_seed(0)
    query, key, value = (
        torch.randn(sum(LENGTHS), 4, 64, generator=generator, device=GPU, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    return query, key, value


def values_and_gradients(mixed_TNH: Tensor, heads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weight_TNH = torch.linspace(-1, 1, mixed_TNH.numel(), device=GPU, dtype=mixed_TNH.dtype).view(mixed_TNH.shape)
    return mixed_TNH.detach(), *torch.autograd.grad((mixed_TNH * weight_TNH).sum(), heads)


@pytest.mark.parametrize("reads", ["all", "by position", "by sequence", "window"])
def test_the_kernel_gives_what_rectangles_give(reads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    causal_B = np.ones(len(LENGTHS), dtype=np.bool_) if reads == "by sequence" else None
    sequences = PackedSequences.from_lengths(LENGTHS, causal_B=causal_B).to(GPU)
    heads, scope = drawn_heads(), Scope(None, "")

    def attended() -> Tensor:
        if reads == "window":
            return sliding_window_attention(*heads, sequences, each_side=16, dropout_rate=0.0, scope=scope)
        visible = causal if reads == "by position" else None
        return attend(*heads, sequences, dropout_rate=0.0, scope=scope, visible=visible)

    monkeypatch.setattr(varlen, "_reported", set())
    found = values_and_gradients(attended(), heads)
    assert varlen._reported == {"torch's kernel for packed sequences"}
    monkeypatch.setattr(varlen, "has_kernels", lambda device: False)
    torch.testing.assert_close(found, values_and_gradients(attended(), heads), **BF16)


@pytest.mark.parametrize("reads", ["all", "by position", "window"])
def test_dropped_probabilities_have_the_mean_of_all_and_their_own_gradient(reads: str) -> None:
    """The output is linear in the values, so its gradient under the same draw gives the effect of changing them."""
    sequences, scope, rate = PackedSequences.from_lengths(LENGTHS).to(GPU), Scope(None, ""), 0.2
    query, key, value = (each.detach() for each in drawn_heads())

    def attended(value: Tensor, rate: float, seed: int) -> Tensor:
        torch.manual_seed(seed)
        if reads == "window":
            return sliding_window_attention(query, key, value, sequences, each_side=16, dropout_rate=rate, scope=scope)
        visible = causal if reads == "by position" else None
        return attend(query, key, value, sequences, dropout_rate=rate, scope=scope, visible=visible)

    whole = attended(value, 0.0, 0).float()
    draws = torch.stack([attended(value, rate, seed).float() for seed in range(200)])
    assert torch.equal(draws[7], attended(value, rate, 7).float())
    assert not torch.equal(draws[7], draws[8])
    # A sum of dropped probabilities times values has at most the deviation of a single value.
    error = (draws.mean(dim=0) - whole).abs().max()
    assert error < 6 * float(value.abs().max()) * (rate / (1 - rate) / len(draws)) ** 0.5
    assert (draws.mean(dim=0) - whole).abs().mean() < 0.2 * (draws[0] - whole).abs().mean()
    leaf = value.clone().requires_grad_()
    weight, change = torch.randn(2, *value.shape, device=GPU, dtype=value.dtype)
    (gradient,) = torch.autograd.grad((attended(leaf, rate, 3) * weight).sum(), leaf)
    moved = (attended(change, rate, 3).float() * weight.float()).sum()
    expected = (gradient.float() * change.float()).sum()
    torch.testing.assert_close(moved, expected, rtol=0.02, atol=0.02 * float(change.float().norm()))


def test_queries_keys_and_values_in_one_product_are_those_of_three() -> None:
    torch.manual_seed(0)
    maps = [torch.nn.Linear(96, rows).to(GPU) for rows in (64, 32, 32)]
    states = torch.randn(77, 96, device=GPU, requires_grad=True)
    found, expected = (project(maps, states) for project in (project_at_once, project_separately))
    torch.testing.assert_close(list(found), list(expected), rtol=1e-4, atol=1e-5)
    leaves = [states, *(parameter for each in maps for parameter in each.parameters())]
    gradients = [torch.autograd.grad(sum(each.square().sum() for each in rows), leaves) for rows in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


SIZES = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}


@pytest.mark.parametrize(
    "config",
    [BertConfig(**SIZES), Gpt2Config(**SIZES), ModernBertConfig(**SIZES, local_attention=32)],
    ids=lambda config: config.family,
)
def test_states_of_a_model_are_the_same_through_the_kernel(
    config: BertConfig | Gpt2Config | ModernBertConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = config.build(300).eval()
    initialise(encoder, config, seed=1)
    encoder.to(GPU)
    batch = PackedBatch.from_ids([[7 + place % 200 for place in range(length)] for length in LENGTHS]).to(GPU)

    def states() -> Tensor:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            states_TD: Tensor = encoder(batch).float()
        return states_TD

    monkeypatch.setattr(varlen, "_reported", set())
    found = states()
    assert varlen._reported == {"torch's kernel for packed sequences"}
    monkeypatch.setattr(varlen, "has_kernels", lambda device: False)
    torch.testing.assert_close(found, states(), rtol=0.05, atol=0.05)
