"""Weights stored in bfloat16 compute the same as autocast, and one row is multiplied like several."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models.families.small_gpt2 import small_gpt2
from torch import nn

from bertkit.data.batch import PackedBatch
from bertkit.models.decoding.causal import CachedNextTokens
from bertkit.models.families.elmo import ElmoConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.matmul import Linear
from bertkit.models.quantisation.bf16 import cast_linears_to_bf16, use_fixed_row_blocks

VOCABULARY = 61


def test_maps_alone_or_words_too_become_bf16() -> None:
    maps, both = small_gpt2(VOCABULARY, positions=30), small_gpt2(VOCABULARY, positions=30)
    cast_linears_to_bf16(maps)
    cast_linears_to_bf16(both, words=True)
    kinds = {Linear: (True, True), nn.Embedding: (False, True), nn.LayerNorm: (False, False)}
    for kind, expected in kinds.items():
        for model, is_bf16 in zip((maps, both), expected, strict=True):
            own = [part.weight.dtype for part in model.modules() if type(part) is kind]
            assert own
            assert set(own) == {torch.bfloat16 if is_bf16 else torch.float32}


@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_tokens_in_bf16_are_near_those_in_fp32(rows: int) -> None:
    model = small_gpt2(VOCABULARY, positions=30)
    reduced = copy.deepcopy(model)
    cast_linears_to_bf16(reduced, words=True)
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


@torch.inference_mode()
def test_elmos_lstms_stay_in_single_precision() -> None:
    settings = {"character_size": 4, "filters": ((1, 6),), "projection_size": 6, "lstm_width": 11}
    model = HeadedModel(ElmoConfig(**settings).build(VOCABULARY))  # type: ignore[arg-type]  # of several types
    model.initialise(3)
    batch = PackedBatch.from_ids([[5, 6, 7], [8]])
    expected = model(batch)
    cast_linears_to_bf16(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(batch)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)
    assert {part.weight.dtype for part in model.modules() if isinstance(part, Linear)} == {
        torch.float32,
        torch.bfloat16,
    }


@pytest.mark.parametrize("width", [30, 1536])
@torch.inference_mode()
def test_rows_that_are_multiplied_a_few_at_once_do_not_depend_on_their_number(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleList([nn.Linear(width, 384)]).bfloat16()
    states = torch.randn(640, width, generator=generator).bfloat16()
    plain = model[0](states)
    use_fixed_row_blocks(model, tokens=64, others=16)
    found = model[0](states)
    torch.testing.assert_close(found, plain, rtol=0.02, atol=0.02)
    assert torch.equal(found[64:128], model[0](states[64:128]))
    assert torch.equal(found[-64:], model[0](states[-192:])[-64:])
