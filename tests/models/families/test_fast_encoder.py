"""The fast encoder against a second implementation, and the required properties of its parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.families.reference_fast_encoder import hidden_states, logits
from tests.models.from_equations import (
    SIZES,
    TOLERANCE,
    VOCABULARY,
    assert_apart,
    random_model,
    random_sequences,
    saved_weights,
)

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.errors import UsageError
from bertkit.models.conversion.pruning import keep_layers, prune_heads
from bertkit.models.families.fast_encoder import FastEncoderConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder

CLOSE = {"rtol": 1e-3, "atol": 3e-5}
"""Angles of rotary positions are in single precision for any precision of the model."""


def config(**changes: Any) -> FastEncoderConfig:
    return FastEncoderConfig.model_validate({**SIZES, "norm_eps": 1e-3, **changes})


def made(heads: tuple[str, ...] = ("masked_lm",), **changes: Any) -> HeadedModel:
    return random_model(config(**changes), heads=heads)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"neighbours": 3, "pair_rows": 53, "skips": True, "query_key_norm": False, "head_norm_weights": True},
        {"num_hidden_layers": 4, "value_embeddings": 2, "pair_rows": 11, "skips": True, "embedding_skip": True},
        {"num_hidden_layers": 5, "value_embeddings": 1, "rope_theta": 31.0, "embedding_skip": True, "neighbours": 0},
        {"num_hidden_layers": 1, "skips": True, "head_transform": False, "hidden_act": "relu2"},
    ],
)
def test_states_logits_and_gradients_are_those_of_the_equations(changes: dict[str, Any], tmp_path: Path) -> None:
    model, rows = made(**changes).double(), random_sequences()
    settings = config(**changes)
    weights, batch = saved_weights(model, tmp_path), PackedBatch.from_ids(rows)
    layers = range(settings.num_hidden_layers)
    points = [*(f"blocks.{layer}.hook_resid_pre" for layer in layers), "ln_final.hook_normalized"]
    recorder = Recorder(points)
    ours_TV = model.masked_lm_logits(model(batch, recorder))
    theirs = [hidden_states(weights, torch.tensor(row), settings) for row in rows]
    for number, point in enumerate(points):
        expected = torch.cat([states[number] for states in theirs])
        torch.testing.assert_close(recorder.kept[point], expected, **CLOSE)
    theirs_TV = torch.cat([logits(weights, states[-1], settings) for states in theirs])
    torch.testing.assert_close(ours_TV, theirs_TV, **CLOSE)

    ours_TV.square().mean().backward()
    theirs_TV.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = model.hub_form().to_hub({name: each for name, each in gradients.items() if each is not None})
    assert set(compared) == set(weights)
    for name, gradient in compared.items():
        difference = gradient - weights[name].grad
        assert difference.norm() <= 1e-4 * gradient.norm(), name


def test_the_first_step_sees_normalised_embeddings_alone() -> None:
    model = HeadedModel(config(num_hidden_layers=4, value_embeddings=2, pair_rows=31).build(VOCABULARY), ("masked_lm",))
    model.initialise(3)
    batch = PackedBatch.from_ids(random_sequences())
    embedded_TD = model.encoder.word_embedding(batch.ids_T)
    normed_TD = embedded_TD / (embedded_TD.square().mean(dim=-1, keepdim=True) + 1e-3).sqrt()
    again_TD = normed_TD / (normed_TD.square().mean(dim=-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(model(batch), again_TD, **TOLERANCE)


def test_selected_tokens_are_computed_alone_with_equal_states() -> None:
    model, batch = made(num_hidden_layers=4, value_embeddings=1, pair_rows=97), PackedBatch.from_ids(random_sequences())
    index_M = torch.tensor([3, 37, 40, 60])
    torch.testing.assert_close(model.encoder.forward_tokens(batch, index_M), model(batch)[index_M], **TOLERANCE)


@pytest.mark.parametrize("training", [False, True])
def test_one_sequence_never_sees_another(training: bool) -> None:
    model, rows = (
        made(neighbours=3, pair_rows=97, hidden_dropout_prob=0.1).train(training),
        random_sequences([5, 17, 9, 37, 9, 1, 2]),
    )
    assert_apart(model, rows)


def test_a_sequence_read_from_left_to_right_sees_no_later_token() -> None:
    model, rows = (
        made(neighbours=3, pair_rows=97, num_hidden_layers=4, value_embeddings=2),
        random_sequences([9, 12, 5]),
    )
    changed = [rows[0], [*rows[1][:7], (rows[1][7] + 1) % VOCABULARY, *rows[1][8:]], rows[2]]
    causal_B = np.array([False, True, False])
    states = []
    for each in (rows, changed):
        batch = PackedBatch.from_ids(each)
        sequences = PackedSequences.from_lengths(np.array([9, 12, 5]), causal_B=causal_B)
        states.append(model(replace(batch, sequences=sequences))[9:21])
    same_S = [torch.equal(before, after) for before, after in zip(*states, strict=True)]
    assert same_S == [True] * 7 + [False] * 5


def test_no_value_is_fetched_from_the_device() -> None:
    """Neither of a batch that is read in both directions nor of one that is read from left to right."""
    with torch.device("meta"):
        model = made(neighbours=3, pair_rows=97)
    for causal in (False, True):
        assert model(PackedBatch.from_ids([[8], [5, 6, 7]], causal=causal).to(torch.device("meta"))).is_meta


def test_layers_can_be_removed_where_nothing_depends_on_their_number() -> None:
    model, batch = made(pair_rows=31), PackedBatch.from_ids(random_sequences())
    smaller = keep_layers(model, [0, 2])
    layers = model.encoder.get_submodule("layers")
    del layers[1]
    torch.testing.assert_close(smaller(batch), model(batch), **TOLERANCE)
    for setting in ({"skips": True}, {"num_hidden_layers": 4, "value_embeddings": 1}):
        with pytest.raises(UsageError, match="the inputs of a layer depend on its number"):
            keep_layers(made(**setting), [0, 1])


def test_heads_can_be_pruned_unless_tokens_have_values_for_all_of_them() -> None:
    model, batch = made(pair_rows=31), PackedBatch.from_ids(random_sequences())
    with torch.no_grad():
        model.encoder.get_submodule("layers.0.attention.output").weight[:, 6:12] = 0.0
    expected_TD = model(batch)
    prune_heads(model, {0: [1]})
    torch.testing.assert_close(model(batch), expected_TD, **TOLERANCE)
    with pytest.raises(UsageError, match="value_embeddings hold those of all heads together"):
        prune_heads(made(num_hidden_layers=4, value_embeddings=1), {0: [1]})


@pytest.mark.parametrize("head", list(FastEncoderConfig().heads()))
def test_what_is_saved_is_read_back(head: str, tmp_path: Path) -> None:
    model = made(heads=(head,), num_hidden_layers=4, value_embeddings=1, pair_rows=29)
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    assert again.encoder.config == model.encoder.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 63, "num_attention_heads": 7}, "must be even"),
        ({"value_embeddings": 2}, "layers at either end, but there are only 3 layers"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)
