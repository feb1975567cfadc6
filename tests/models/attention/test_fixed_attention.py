"""Heads that attend only by position: the patterns in plain loops, packed texts, and the model around them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bertkit.data.batch import PackedSequences
from bertkit.errors import UsageError
from bertkit.models.attention.fixed_attention import PATTERNS, FixedHeadsAttention, fixed_patterns
from bertkit.models.encoder_decoder import SEQ2SEQ
from bertkit.models.families.transformer import TransformerSeq2SeqConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder, Scope
from bertkit.pretraining.recipe import load_recipe
from bertkit.recipe.resolve import Override, with_overrides

LENGTHS = [1, 7, 2, 12]


def pattern(number: int, length: int) -> np.ndarray:
    """The paper's definition, one weight at a time."""
    found = np.zeros((length, length))
    for i in range(length):
        for j in range(length):
            rising, falling = (j + 1) ** 3, (length - j) ** 3
            found[i, j] = [
                j == i, j == i - 1, j == i + 1, rising * (j <= i - 2), falling * (j >= i + 2), rising, falling,
            ][number]  # fmt: skip
    sums = found.sum(axis=1, keepdims=True)
    return found / np.where(sums == 0, 1, sums)


def attention() -> FixedHeadsAttention:
    torch.manual_seed(1)
    return FixedHeadsAttention(18, 9, dropout_rate=0.0)


@pytest.mark.parametrize("length", [1, 2, 3, 11])
def test_a_pattern_is_the_papers(length: int) -> None:
    (block,) = PackedSequences.from_lengths(np.array([length])).blocks
    found = fixed_patterns(block, torch.device("cpu"))
    assert found.shape == (1, PATTERNS, length, length)
    for number in range(PATTERNS):
        np.testing.assert_allclose(found[0, number].numpy(), pattern(number, length), rtol=1e-6, err_msg=str(number))
    assert set(found[0, 3:].sum(dim=-1).round(decimals=5).flatten().tolist()) <= {0.0, 1.0}


def test_texts_of_a_batch_have_patterns_of_their_own_lengths() -> None:
    """Packed texts equal single ones, and the fixed heads apply the patterns to their values."""
    layer = attention()
    rows = [torch.randn(length, 18) for length in LENGTHS]
    with torch.no_grad():
        alone = [layer(row, PackedSequences.from_lengths(np.array([len(row)])), Scope(None, "")) for row in rows]
        recorder = Recorder(["hook_z"])
        sequences = PackedSequences.from_lengths(np.array(LENGTHS))
        together = layer(torch.cat(rows), sequences, Scope(recorder, ""))
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)
        mixed = torch.split(recorder.kept["hook_z"], LENGTHS)
        for row, found in zip(rows, mixed, strict=True):
            values = layer.value(row).view(len(row), 9, 2).double().numpy()
            for number in range(PATTERNS):
                expected = pattern(number, len(row)) @ values[:, number]
                np.testing.assert_allclose(found[:, number].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_only_learnt_heads_have_queries_and_keys() -> None:
    layer = attention()
    assert layer.query.weight.shape == layer.key.weight.shape == (4, 18)
    states = torch.randn(5, 18, requires_grad=True)
    layer(states, PackedSequences.from_lengths(np.array([5])), Scope(None, "")).square().sum().backward()
    assert all(bool((part.weight.grad != 0).any()) for part in (layer.query, layer.key, layer.value, layer.output))


def small_model(**changes: object) -> HeadedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 20}
    config = TransformerSeq2SeqConfig.model_validate({**sizes, "fixed_heads": True, **changes})
    model = HeadedModel(config.build(41), [SEQ2SEQ])
    model.initialise(seed=3)
    return model.eval()


def test_a_directory_holds_it(tmp_path: Path) -> None:
    model = small_model()
    assert isinstance(model.encoder.layers[1].attention, FixedHeadsAttention)
    assert not any(isinstance(part, FixedHeadsAttention) for part in model.encoder.decoder_layers.modules())
    save_model(model, None, tmp_path / "m")
    again, report = load_model(tmp_path / "m")
    assert not report.missing
    assert not report.unexpected
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert "fixed_heads" not in small_model(fixed_heads=False).encoder.config.to_hub()


def test_too_few_heads_are_told() -> None:
    recipe = load_recipe("transformer-fixed-attention")
    with pytest.raises(UsageError, match=r"num_attention_heads \(4\) must be above 7 with fixed_heads"):
        with_overrides(recipe, [Override("model.num_attention_heads", 4)])
