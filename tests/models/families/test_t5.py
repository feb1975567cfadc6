"""T5: its two released forms, generation compared with `transformers`, and its initial weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_encoder_decoder import FAMILIES, TOLERANCE, VOCABULARY, Family, padded, rows, sides, twins

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.generation.causal import Limits, Prompt
from bertkit.generation.search import search
from bertkit.generation.settings import GenerationSettings
from bertkit.models.decoding.conditional import CachedSourceNextTokens
from bertkit.models.encoder_decoder import SEQ2SEQ
from bertkit.models.families.t5 import T5Config
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel

T5S = [family for family in FAMILIES if family.config_class == "T5Config"]
forms = pytest.mark.parametrize("family", T5S, ids=str)
START, ROOM = 0, 14


@forms
@pytest.mark.parametrize("beams", [1, 3])
def test_targets_are_those_that_transformers_generates(family: Family, beams: int, tmp_path: Path) -> None:
    oracle, _ = twins(family, tmp_path)
    with torch.no_grad():
        oracle.shared.weight.mul_(0.2)  # otherwise tied words repeat themselves
    oracle.save_pretrained(tmp_path)
    model, _ = load_model(tmp_path)
    sources = rows([7, 3, 12, 1, 5], 8)

    def generated(beams: int) -> list[list[int]]:
        rows_BU = oracle.generate(
            input_ids=padded(sources),
            attention_mask=padded([[1] * len(row) for row in sources]),
            num_beams=beams,
            max_new_tokens=ROOM,
            do_sample=False,
            length_penalty=1.0,
            use_cache=False,  # theirs has as many layers as the encoder, and fails if the decoder has more
        )
        return [row[1:] for row in rows_BU.tolist()]

    # Words that end some targets early and others late.
    oracle.generation_config.eos_token_id = VOCABULARY + 1
    free = generated(1)
    ends = sorted({free[0][4], free[1][6], free[3][8]})
    oracle.generation_config.eos_token_id = ends
    theirs = generated(beams)
    decoder = CachedSourceNextTokens(model)
    decoder.read(sources)
    settings = GenerationSettings(
        method="greedy" if beams == 1 else "beam", beam=None if beams == 1 else beams, max_new_tokens=ROOM
    ).resolved(is_causal=False, reads_source=True)
    settings = settings if beams == 1 else settings.model_copy(update={"penalty": "length", "length_penalty": 1.0})
    prompts = [Prompt([START], number, ROOM) for number in range(len(sources))]
    ours = search(decoder, prompts, Limits(frozenset(ends), (), None), settings)
    written = [own[0].ids for own in ours]
    assert len({len(ids) for ids in written}) > 1
    assert written == [_up_to_end(row, ends) for row in theirs]


def _up_to_end(ids: list[int], ends: list[int]) -> list[int]:
    places = [place for place, token in enumerate(ids) if token in ends]
    return ids[: places[0]] if places else ids


def _logits(model: HeadedModel) -> torch.Tensor:
    batch = PackedBatch.from_pairs(rows([4, 9], 1), rows([5, 2], 2))
    with torch.no_grad():
        return model.token_logits(SEQ2SEQ, sides(batch, model(batch))[1])


@pytest.mark.parametrize(
    "keys",
    [
        {"tie_word_embeddings": False},
        {"tie_word_embeddings": False, "scale_decoder_outputs": False},
        {"tie_word_embeddings": True, "scale_decoder_outputs": False},
    ],
    ids=["as released", "as written here", "as transformers 5 writes it"],
)
def test_all_forms_of_an_untied_config_are_one_model(keys: dict[str, Any], tmp_path: Path) -> None:
    _, model = twins(T5S[1], tmp_path)
    path = tmp_path / "config.json"
    contents = json.loads(path.read_text())
    contents = {key: value for key, value in contents.items() if key not in ("scale_decoder_outputs",)}
    path.write_text(json.dumps({**contents, **keys}))
    again, _ = load_model(tmp_path)
    assert torch.equal(_logits(again), _logits(model))
    save_model(again, None, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (written["tie_word_embeddings"], written["scale_decoder_outputs"]) == (False, False)


def test_states_scaled_before_words_of_their_own_are_refused(tmp_path: Path) -> None:
    twins(T5S[1], tmp_path)
    path = tmp_path / "config.json"
    contents = json.loads(path.read_text())
    path.write_text(json.dumps({**contents, "tie_word_embeddings": False, "scale_decoder_outputs": True}))
    with pytest.raises(DataError, match="scale_decoder_outputs is True, but tie_word_embeddings is false"):
        load_model(tmp_path)


def test_buckets_that_no_distance_fills_are_refused() -> None:
    with pytest.raises(ValueError, match=r"relative_attention_max_distance \(16\) must be above half of"):
        T5Config(relative_attention_max_distance=16)


def test_a_table_that_nothing_reads_in_old_files_is_no_weight(tmp_path: Path) -> None:
    from bertkit.models.files.model_files import read_weights, write_safetensors

    _, model = twins(T5S[0], tmp_path)
    tensors = read_weights(tmp_path / "model.safetensors")
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(10, 3)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    again, report = load_model(tmp_path)
    assert not report.unexpected
    assert torch.equal(_logits(again), _logits(model))


def test_sequences_may_be_longer_than_any_table(tmp_path: Path) -> None:
    """Far beyond the distances that have their own bucket."""
    oracle, model = twins(T5S[0], tmp_path)
    sources, targets = rows([90], 3), rows([70], 4)
    batch = PackedBatch.from_pairs(sources, targets)
    with torch.no_grad():
        logits_UV = model.token_logits(SEQ2SEQ, sides(batch, model(batch))[1])
        expected = oracle(input_ids=torch.tensor(sources), decoder_input_ids=torch.tensor(targets)).logits[0]
    torch.testing.assert_close(logits_UV, expected, **TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
def test_initial_weights_are_those_of_mesh_tensorflow(tied: bool) -> None:
    """Each map with the inverse root of its inputs; queries also with that of the head width; words with one."""
    proj: Any = "relu" if tied else "gated-gelu"
    config = T5Config(
        hidden_size=96, head_width=20, num_attention_heads=7, intermediate_size=150, num_hidden_layers=2,
        feed_forward_proj=proj, tie_word_embeddings=tied, initializer_factor=0.5,
    )  # fmt: skip
    model = HeadedModel(config.build(700), (SEQ2SEQ,))
    model.initialise(0)
    for name, part in model.named_parameters():
        if "norm" in name:
            assert part.unique().tolist() == [1.0], name
            continue
        inputs = part.shape[1]
        inputs = 96 * 20 if name.endswith("query.weight") else inputs
        inputs = 96 if "distance" in name else inputs
        inputs = 1 if name.endswith("embeddings.word.weight") else inputs
        assert part.std().item() == pytest.approx(0.5 * inputs**-0.5, rel=0.12 if "distance" in name else 0.04), name


def test_norms_have_no_weight_decay() -> None:
    from bertkit.training.optimizers.base import decay_groups

    model = T5Config(hidden_size=12, head_width=4, num_attention_heads=2, num_hidden_layers=1).build(20)
    kept = {id(part) for part in decay_groups(model)[1]}
    assert {name for name, part in model.named_parameters() if id(part) in kept} == {
        name for name, _ in model.named_parameters() if "norm" in name
    }


def test_training_in_bfloat16_is_near_single_precision(tmp_path: Path) -> None:
    _, model = twins(T5S[1], tmp_path)
    batch = PackedBatch.from_pairs(rows([11, 6], 1), rows([9, 4], 2))
    with torch.no_grad():
        for part in model.parameters():
            part.mul_(0.5)
        exact = model(batch)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(batch)
    assert (rounded - exact).abs().max() < 0.05 * exact.abs().max()
