"""Weights kept in bfloat16 give what autocast gives, and one row is multiplied as several are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bertkit.models.bf16 import keep_in_bf16, products_of_one_row
from bertkit.models.decoding import CachedNextTokens
from bertkit.models.gpt2 import Gpt2Config
from bertkit.models.headed import HeadedModel

VOCABULARY = 61


def gpt2() -> HeadedModel:
    config = Gpt2Config(
        hidden_size=36,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=50,
        max_position_embeddings=30,
        initializer_range=0.2,
    )
    model = HeadedModel(config.build(VOCABULARY), ["causal_lm"])
    model.initialise(1)
    return model.eval()


def test_maps_alone_or_words_too_become_bf16() -> None:
    maps, both = gpt2(), gpt2()
    keep_in_bf16(maps)
    keep_in_bf16(both, words=True)
    kinds = {nn.Linear: (True, True), nn.Embedding: (False, True), nn.LayerNorm: (False, False)}
    for kind, expected in kinds.items():
        for model, is_bf16 in zip((maps, both), expected, strict=True):
            own = [part.weight.dtype for part in model.modules() if type(part) is kind]
            assert own
            assert set(own) == {torch.bfloat16 if is_bf16 else torch.float32}


@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_tokens_in_bf16_are_near_those_in_fp32(rows: int) -> None:
    model = gpt2()
    reduced = copy.deepcopy(model)
    keep_in_bf16(reduced, words=True)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCABULARY, (rows, 5), generator=generator).tolist()
    exact, near = CachedNextTokens(model, "causal_lm"), CachedNextTokens(reduced, "causal_lm")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [near.start(ids, 12)]
    expected = [exact.start(ids, 12)]
    for _ in range(6):
        token_R = torch.randint(1, VOCABULARY, (rows,), generator=generator)
        expected.append(exact.step(token_R))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(near.step(token_R))
    differences = torch.cat(found) - torch.cat(expected)
    assert differences.std() < 0.015 * torch.cat(expected).std()
    assert all(logits_RV.dtype is torch.float32 for logits_RV in found)


def test_one_row_alone_in_bf16_alone_leaves_onednn() -> None:
    assert torch.backends.mkldnn.enabled
    with products_of_one_row(1):
        assert torch.backends.mkldnn.enabled
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with products_of_one_row(2):
            assert torch.backends.mkldnn.enabled
        with products_of_one_row(1):
            assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled
