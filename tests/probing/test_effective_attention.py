"""Effective attention: the same output, no component in the null space, and no change for short texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bertkit.errors import DataError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.eurobert import EuroBertConfig
from bertkit.models.families.fast_encoder import FastEncoderConfig
from bertkit.models.families.transformer import TransformerSeq2SeqConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.quantisation.calibrated import CalibratedLinear, InputRange
from bertkit.models.quantisation.quantised import quantise
from bertkit.models.recorder import Recorder
from bertkit.models.scoring.rules import reads_causally
from bertkit.probing.attention.measure import pattern_points
from bertkit.probing.effective_attention.measure import (
    ATTENDED,
    VALUES,
    LayerAttention,
    correlations,
    effective,
    layer_attention,
    output_maps,
)
from bertkit.probing.effective_attention.run import make_texts
from bertkit.probing.sentences import EncodedSentence, Sentence, TextEncoder, packed
from bertkit.probing.states import recorded
from tests.models.oracle import all_cases, make_twins
from tests.probing.tiny_models import TEXTS, cpu_engine, tiny_model, tiny_tokenizer
from tests.text.corpora import english

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 36, "max_position_embeddings": 60}
WIDTH = 10
"""Width of a head of the tiny model."""


def encoded() -> list[EncodedSentence]:
    tokenizer = tiny_tokenizer()
    return list(TextEncoder.of(tiny_model(tokenizer), tokenizer).encode(Sentence(text, text) for text in TEXTS))


@torch.no_grad()
def mixed(model: HeadedModel, sentence: EncodedSentence) -> list[Tensor]:
    """T of each layer, (N, n, D): the values of each head through its part of the output projection."""
    layers = len(pattern_points(model))
    batch = packed([sentence], causal=reads_causally(model))
    values = recorded(model.eval(), batch, [VALUES.format(n=layer) for layer in range(layers)])
    return [value.double().transpose(0, 1) @ own for value, own in zip(values, output_maps(model, layers), strict=True)]


@pytest.fixture(scope="module")
def found() -> list[tuple[EncodedSentence, list[LayerAttention]]]:
    return list(layer_attention(tiny_model(tiny_tokenizer()), encoded(), cpu_engine()))


def test_the_outcome_is_the_same(found: list[tuple[EncodedSentence, list[LayerAttention]]]) -> None:
    assert len(found) == len(TEXTS)
    longer = 0
    for sentence, layers in found:
        for layer, mixed_NnD in zip(layers, mixed(tiny_model(tiny_tokenizer()), sentence), strict=True):
            longer += sentence.ids_T.size > WIDTH
            torch.testing.assert_close(layer.effective_Nnn @ mixed_NnD, layer.raw_Nnn @ mixed_NnD, rtol=0, atol=1e-6)
    assert longer


def test_nothing_changes_in_a_short_text_of_full_rank_and_something_does_in_a_long_one(
    found: list[tuple[EncodedSentence, list[LayerAttention]]],
) -> None:
    sizes = set()
    for sentence, layers in found:
        size = sentence.ids_T.size
        sizes.add(size <= WIDTH)
        for layer in layers:
            assert layer.rank_N.tolist() == [min(size, WIDTH)] * 2
            if size <= WIDTH:
                torch.testing.assert_close(layer.effective_Nnn, layer.raw_Nnn, rtol=0, atol=1e-9)
                torch.testing.assert_close(correlations(layer), torch.ones(2, dtype=torch.float64))
            else:
                assert bool((correlations(layer) < 1).all())
    assert sizes == {True, False}


def test_two_heads_of_equal_outcome_have_one_effective_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(1, 9, 4, generator=generator, dtype=torch.float64)
    maps = torch.softmax(torch.randn(1, 9, 9, generator=generator, dtype=torch.float64), -1)
    null = torch.linalg.svd(mixed[0].T).Vh[4:]
    other = maps + torch.randn(1, 9, 5, generator=generator, dtype=torch.float64) @ null
    torch.testing.assert_close(other @ mixed, maps @ mixed)
    torch.testing.assert_close(effective(other, mixed)[0], effective(maps, mixed)[0])
    torch.testing.assert_close(effective(effective(maps, mixed)[0], mixed)[0], effective(maps, mixed)[0])


def test_a_direction_that_is_not_there_is_left_out() -> None:
    mixed = torch.zeros(1, 3, 3, dtype=torch.float64)
    mixed[0, 0, 0], mixed[0, 1, 1] = 2.0, 1e-3
    maps = torch.full((1, 3, 3), 1 / 3, dtype=torch.float64)
    found, rank = effective(maps, mixed)
    assert rank.tolist() == [2]
    torch.testing.assert_close(found, maps * torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("name", ["bert", "albert-groups", "modernbert", "mobilebert", "xlnet", "deberta-3", "gpt2"])
def test_the_recorded_projection_makes_of_maps_what_the_model_makes(name: str, tmp_path: object) -> None:
    pytest.importorskip("transformers")
    from pathlib import Path

    case = next(case for case in all_cases() if case.name == name)
    model = make_twins(case, next(iter(case.heads.values())), Path(str(tmp_path))).model.eval()
    sentence = encoded()[0]
    ids = sentence.ids_T % 90 + 2
    text = EncodedSentence(0, "", sentence.words, ids, 0 * ids, sentence.word_T, sentence.spans_W2)
    ((_, layers),) = layer_attention(model, [text], cpu_engine())
    zero = Recorder(
        [ATTENDED.format(n=n) for n in range(len(layers))],
        {f"blocks.{n}.attn.hook_z": torch.zeros_like for n in range(len(layers))},
    )
    whole = Recorder([ATTENDED.format(n=n) for n in range(len(layers))])
    with torch.no_grad():
        model(packed([text]), whole)
        model(packed([text]), zero)
    for n, (layer, mixed_NnD) in enumerate(zip(layers, mixed(model, text), strict=True)):
        bias = zero.kept[ATTENDED.format(n=n)]
        expected = whole.kept[ATTENDED.format(n=n)] - bias
        torch.testing.assert_close((layer.raw_Nnn @ mixed_NnD).sum(0).float(), expected, rtol=1e-4, atol=1e-4)


def test_the_recorded_projection_is_the_layers_weight() -> None:
    model = tiny_model(tiny_tokenizer())
    with torch.no_grad():
        model.encoder.layers[1].attention.output.bias.normal_()
    maps = output_maps(model, 2)
    weight_DD = model.encoder.layers[1].attention.output.weight
    torch.testing.assert_close(maps[1].flatten(0, 1).float(), weight_DD.T, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (FastEncoderConfig(hidden_size=32, value_embeddings=1, num_attention_heads=4, **SMALL), 4),
        (EuroBertConfig(hidden_size=32, num_key_value_heads=2, num_attention_heads=4, **SMALL), 4),
        (TransformerSeq2SeqConfig(hidden_size=32, num_attention_heads=8, fixed_heads=True, **SMALL), 1),
    ],
    ids=["values-with-embeddings", "shared-values", "fixed-heads"],
)
def test_effective_maps_in_place_of_the_raw_ones_give_the_same_output(config: EncoderConfig, heads: int) -> None:
    model = tiny_model(tiny_tokenizer(), config, ())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    sentence = encoded()[3]
    ((_, layers),) = layer_attention(model, [sentence], cpu_engine())
    for number, layer in enumerate(layers):
        assert layer.raw_Nnn.shape == layer.effective_Nnn.shape == (heads, *2 * [sentence.ids_T.size])
        assert bool((correlations(layer) < 0.999).all())
        point, output = f"blocks.{number}.attn.hook_pattern", ATTENDED.format(n=number)
        outputs = []
        for maps_Nnn in (layer.raw_Nnn, layer.effective_Nnn):
            recorder = Recorder([output], {point: lambda raw, maps=maps_Nnn: maps[None].to(raw.dtype)})
            with torch.no_grad():
                model(packed([sentence]), recorder)
            outputs.append(recorder.kept[output])
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe"])
def test_texts_have_at_most_the_requested_length(kind: str) -> None:
    encoder = TextEncoder(tiny_tokenizer(kind, {"wordpiece": 110, "byte-bpe": 300}[kind]), max_tokens=60)
    sentences = list(encoder.encode(Sentence("sentence", text) for text in english(80, seed=3)))
    made = make_texts(sentences, encoder, [8, 31, 60], 6)
    assert {length: len(texts) for length, texts in made.items()} == {8: 6, 31: 6, 60: 6}
    assert all(length - 8 < text.ids_T.size <= length for length, texts in made.items() for text in texts)
    left_out = [name for names in encoder.notes.named.values() for name in names]
    assert all(name.startswith("sentence: ") for name in left_out)


def test_a_family_without_the_points_is_refused() -> None:
    with pytest.raises(DataError, match=r"family bert has no point blocks\.2\.attn\.hook_v"):
        output_maps(tiny_model(tiny_tokenizer()), 3)


def test_values_that_are_no_numbers_are_refused() -> None:
    model = tiny_model(tiny_tokenizer())
    with torch.no_grad():
        model.encoder.layers[1].attention.value.bias.fill_(float("inf"))
    with pytest.raises(DataError, match=r"blocks\.1\.attn\.hook_v are not numbers"):
        list(layer_attention(model, encoded()[:1], cpu_engine()))


def test_maps_of_a_calibrated_model_are_those_of_its_weights() -> None:
    """Unit vectors are far outside the input range of a map that quantises its input to it."""
    model = tiny_model(tiny_tokenizer())
    whole = output_maps(model, 2)
    ranges = {
        name: InputRange(torch.full((part.in_features,), -0.1), torch.full((part.in_features,), 0.1))
        for name, part in model.encoder.named_modules(prefix="encoder")
        if isinstance(part, torch.nn.Linear)
    }
    quantise(model, ranges)
    assert isinstance(model.get_submodule("encoder.layers.0.attention.output"), CalibratedLinear)
    for found, wanted in zip(output_maps(model, 2), whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.02 * wanted.abs().max().item())
    assert isinstance(model.get_submodule("encoder.layers.0.attention.output"), CalibratedLinear)
