"""NeoBERT against a second implementation of its paper and released code; `transformers` has no class for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.families.reference_neobert import class_logits, hidden_states, logits
from tests.models.from_equations import (
    SIZES,
    TOLERANCE,
    VOCABULARY,
    assert_apart,
    random_model,
    random_sequences,
    saved_weights,
)

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.conversion.pruning import prune_heads
from bertkit.models.families.neobert import NeoBertConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.dropout import Dropout
from bertkit.models.recorder import Recorder


def made(heads: tuple[str, ...] = ("masked_lm",), **changes: Any) -> HeadedModel:
    return random_model(NeoBertConfig.model_validate({**SIZES, **changes}), heads=heads)


@pytest.mark.parametrize("heads", [7, 3, 1])
def test_states_logits_and_gradients_are_those_of_the_released_code(heads: int, tmp_path: Path) -> None:
    model, rows = made(num_attention_heads=heads), random_sequences()
    config = model.encoder.config
    assert isinstance(config, NeoBertConfig)
    weights, batch = saved_weights(model, tmp_path), PackedBatch.from_ids(rows)
    points = [
        "blocks.0.hook_resid_pre",
        *(f"blocks.{layer}.hook_resid_post" for layer in range(3)),
        "ln_final.hook_normalized",
    ]
    recorder = Recorder(points)
    ours_TV = model.masked_lm_logits(model(batch, recorder))
    theirs = [hidden_states(weights, torch.tensor(row), config) for row in rows]
    for number, point in enumerate(points):
        expected = torch.cat([states[number] for states in theirs])
        torch.testing.assert_close(recorder.kept[point], expected, rtol=2e-5, atol=2e-5)
    theirs_TV = torch.cat([logits(weights, states[-1]) for states in theirs])
    torch.testing.assert_close(ours_TV, theirs_TV, rtol=2e-5, atol=2e-5)

    ours_TV.square().mean().backward()
    theirs_TV.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = model.hub_form().to_hub({name: each for name, each in gradients.items() if each is not None})
    assert set(compared) == set(weights)
    for name, gradient in compared.items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-4, atol=2e-5, msg=name)


def test_a_classifier_reads_the_first_token_through_tanh(tmp_path: Path) -> None:
    model, rows = made(("sequence_classification",)), random_sequences()
    weights, batch = saved_weights(model, tmp_path), PackedBatch.from_ids(rows)
    ours_BK = model.logits("sequence_classification", model(batch), batch)
    config = model.encoder.config
    assert isinstance(config, NeoBertConfig)
    theirs = [class_logits(weights, hidden_states(weights, torch.tensor(row), config)[-1]) for row in rows]
    torch.testing.assert_close(ours_BK, torch.stack(theirs), **TOLERANCE)


@pytest.mark.parametrize(("width", "gated"), [(3072, 2048), (51, 40), (12, 8), (13, 8)])
def test_a_gated_layer_is_two_thirds_as_wide_in_multiples_of_eight(width: int, gated: int) -> None:
    assert NeoBertConfig(intermediate_size=width).gated_width == gated


def test_the_file_has_the_names_of_the_published_checkpoint(tmp_path: Path) -> None:
    weights = saved_weights(made(), tmp_path)
    first = {name.partition("transformer_encoder.0.")[2] for name in weights if "transformer_encoder.0." in name}
    norms = {"attention_norm.weight", "ffn_norm.weight"}
    assert first == {"qkv.weight", "wo.weight", "ffn.w12.weight", "ffn.w3.weight", *norms}
    others = {name for name in weights if "transformer_encoder" not in name}
    assert others == {"model.encoder.weight", "model.layer_norm.weight", "decoder.weight", "decoder.bias"}


def test_the_published_config_is_read(tmp_path: Path) -> None:
    """It has neither an activation nor whether norms are root mean squares, since both are the code's defaults."""
    model = made()
    save_model(model, None, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    published = {
        **{key: written[key] for key in sizes},
        "architectures": ["NeoBERTLMHead"],
        "classifier_init_range": 0.02,
        "decoder_init_range": 0.02,
        "dim_head": 6,
        "embedding_init_range": 0.02,
        "kwargs": {"trust_remote_code": True},
        "max_length": 37,
        "model_type": "neobert",
        "norm_eps": 1e-05,
        "pad_token_id": 0,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    batch = PackedBatch.from_ids(random_sequences())
    assert torch.equal(again(batch), model(batch))


@pytest.mark.parametrize(("key", "value"), [("ngpt", True), ("rope", False), ("hidden_act", "gelu"), ("hidden_act", 1)])
def test_other_models_of_the_code_are_refused(key: str, value: object, tmp_path: Path) -> None:
    save_model(made(), None, tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**contents, key: value}))
    with pytest.raises(DataError, match=key):
        load_model(tmp_path)


def test_selected_tokens_are_computed_alone_with_equal_states() -> None:
    model, batch = made(), PackedBatch.from_ids(random_sequences())
    index_M = torch.tensor([3, 37, 40, 60])
    torch.testing.assert_close(model.encoder.forward_tokens(batch, index_M), model(batch)[index_M], **TOLERANCE)


@pytest.mark.parametrize("training", [False, True])
def test_one_sequence_never_sees_another(training: bool) -> None:
    assert_apart(made().train(training), random_sequences([5, 17, 9, 37, 9]))


def test_dropout_stands_where_the_released_code_has_it() -> None:
    model = HeadedModel(
        NeoBertConfig(**SIZES, hidden_dropout_prob=0.05).build(9), ("masked_lm", "sequence_classification")
    )
    rates = {name: part.rate for name, part in model.named_modules() if isinstance(part, Dropout) and part.rate}
    in_layers = {f"encoder.layers.{layer}.dropout": 0.05 for layer in range(3)}
    in_head = {f"sequence_classification.{name}": 0.1 for name in ("input_dropout", "dropout")}
    assert rates == {**in_layers, **in_head}


def test_weights_are_uniform_and_a_classifiers_normal() -> None:
    model = HeadedModel(NeoBertConfig(**SIZES).build(VOCABULARY), ("masked_lm", "sequence_classification"))
    model.initialise(0)
    weights = dict(model.named_parameters())
    for name in ("encoder.word.weight", "encoder.layers.1.feed_forward.gate.weight", "masked_lm.weight"):
        assert weights[name].abs().max().item() <= 0.02, name
        assert weights[name].std().item() == pytest.approx(0.02 / 3**0.5, rel=0.05), name
    dense = weights["sequence_classification.dense.weight"]
    assert dense.std().item() == pytest.approx(0.02, rel=0.05)
    assert dense.abs().max() > 0.05


@pytest.mark.parametrize("head", list(NeoBertConfig().heads()))
def test_what_is_saved_is_read_back(head: str, tmp_path: Path) -> None:
    model = made(heads=(head,))
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    assert again.encoder.config == model.encoder.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_pruned_heads_are_kept_in_the_file(tmp_path: Path) -> None:
    model, batch = made(), PackedBatch.from_ids(random_sequences())
    prune_heads(model, {0: [1, 4], 2: [6]})
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert not report.missing
    torch.testing.assert_close(again(batch), model(batch), **TOLERANCE)
