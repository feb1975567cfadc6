"""JinaBERT against a second implementation of its equations; `transformers` has no class for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families.reference_jina_bert import hidden_states, masked_lm_logits, score
from tests.models.from_equations import (
    EXACT,
    SIZES,
    TOLERANCE,
    assert_apart,
    random_model,
    random_sequences,
    saved_weights,
)

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.models.conversion.pruning import keep_layers, prune_heads
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.jina_bert import JinaBertConfig, JinaBertLikeConfig, JinaBertQkConfig
from bertkit.models.feature_lstm import FeatureLstmConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.dropout import Dropout
from bertkit.models.recorder import Recorder

KINDS = [
    pytest.param(JinaBertConfig, "geglu", id="geglu"),
    pytest.param(JinaBertConfig, "reglu", id="reglu"),
    pytest.param(JinaBertConfig, "original", id="original"),
    pytest.param(JinaBertQkConfig, "geglu", id="qk"),
    pytest.param(JinaBertQkConfig, "reglu", id="qk-reglu"),
]
PUBLISHED = {
    "architectures": ["JinaBertForMaskedLM"],
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": None,
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 42,
    "initializer_range": 0.02,
    "intermediate_size": 51,
    "layer_norm_eps": 1e-3,
    "max_position_embeddings": 37,
    "model_max_length": 37,
    "model_type": "bert",
    "num_attention_heads": 7,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "position_embedding_type": "alibi",
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 97,
}


def made(kind: type[JinaBertLikeConfig], heads: tuple[str, ...] = ("masked_lm",), **changes: Any) -> HeadedModel:
    return random_model(kind.model_validate({**SIZES, "layer_norm_eps": 1e-3, **changes}), heads=heads)


def batch_of(rows: list[list[int]]) -> PackedBatch:
    """The second half of each row is the second segment."""
    return PackedBatch.from_ids(rows, token_types=[[int(2 * i > len(row)) for i in range(len(row))] for row in rows])


@pytest.mark.parametrize("heads", [7, 6])
@pytest.mark.parametrize(("kind", "feed_forward"), KINDS)
def test_states_logits_and_gradients_are_those_of_the_equations(
    kind: type[JinaBertLikeConfig], feed_forward: str, heads: int, tmp_path: Path
) -> None:
    # In double precision, because rounding differences in single precision depend on the processor.
    model, rows = made(kind, num_attention_heads=heads, feed_forward_type=feed_forward).double(), random_sequences()
    config = model.encoder.config
    assert isinstance(config, JinaBertConfig | JinaBertQkConfig)
    weights, batch = saved_weights(model, tmp_path), batch_of(rows)
    points = ["blocks.0.hook_resid_pre", *(f"blocks.{layer}.hook_resid_post" for layer in range(3))]
    recorder = Recorder(points)
    ours_TV = model.masked_lm_logits(model(batch, recorder))
    types = batch.token_types_T.split([len(row) for row in rows])
    theirs = [hidden_states(weights, torch.tensor(row), own, config) for row, own in zip(rows, types, strict=True)]
    for number, point in enumerate(points):
        expected = torch.cat([states[number] for states in theirs])
        torch.testing.assert_close(recorder.kept[point], expected, **EXACT)
    theirs_TV = torch.cat([masked_lm_logits(weights, states[-1], config.layer_norm_eps) for states in theirs])
    torch.testing.assert_close(ours_TV, theirs_TV, **EXACT)

    ours_TV.square().mean().backward()
    theirs_TV.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = model.hub_form().to_hub({name: each for name, each in gradients.items() if each is not None})
    assert set(compared) == set(weights)
    for name, gradient in compared.items():
        torch.testing.assert_close(gradient, weights[name].grad, **EXACT, msg=name)


@pytest.mark.parametrize("kind", [JinaBertConfig, JinaBertQkConfig])
def test_a_rerankers_score_is_that_of_the_equations(kind: type[JinaBertLikeConfig], tmp_path: Path) -> None:
    model, rows = made(kind, ("sequence_classification",)).double(), random_sequences()
    config = model.encoder.config
    assert isinstance(config, JinaBertConfig | JinaBertQkConfig)
    weights, batch = saved_weights(model, tmp_path), batch_of(rows)
    types = batch.token_types_T.split([len(row) for row in rows])
    states = [hidden_states(weights, torch.tensor(row), own, config) for row, own in zip(rows, types, strict=True)]
    expected = torch.cat([score(weights, each[-1]) for each in states])
    logits = model.logits("sequence_classification", model(batch), batch)
    torch.testing.assert_close(logits, expected, **EXACT)


@pytest.mark.parametrize(("kind", "feed_forward"), KINDS)
def test_selected_tokens_have_equal_states_and_no_sequence_sees_another(
    kind: type[JinaBertLikeConfig], feed_forward: str
) -> None:
    model, batch = made(kind, feed_forward_type=feed_forward), batch_of(random_sequences())
    index_M = torch.tensor([3, 37, 40, 60])
    torch.testing.assert_close(model.encoder.forward_tokens(batch, index_M), model(batch)[index_M], **TOLERANCE)
    assert_apart(model.train(), random_sequences([5, 17, 9, 37, 9]))


@pytest.mark.parametrize(("kind", "feed_forward"), KINDS)
def test_dropout_stands_where_the_released_code_has_it(kind: type[JinaBertLikeConfig], feed_forward: str) -> None:
    config = kind.model_validate({**SIZES, "hidden_dropout_prob": 0.05, "feed_forward_type": feed_forward})
    model = HeadedModel(config.build(9), ("masked_lm",))
    rates = {name: part.rate for name, part in model.named_modules() if isinstance(part, Dropout) and part.rate}
    assert set(rates.values()) == {0.05}
    # BERT's own layer drops out the outputs of both sub-layers; a gated one that of its gate.
    places = ("dropout",) if feed_forward == "original" else ("attention.output_dropout", "feed_forward.dropout")
    assert set(rates) == {
        "encoder.dropout",
        *(f"encoder.layers.{layer}.{place}" for layer in range(3) for place in places),
    }


@pytest.mark.parametrize(("kind", "feed_forward"), KINDS)
@pytest.mark.parametrize("head", list(JinaBertConfig().heads()))
def test_what_is_saved_is_read_back(
    kind: type[JinaBertLikeConfig], feed_forward: str, head: str, tmp_path: Path
) -> None:
    model = made(kind, (head,), feed_forward_type=feed_forward)
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    assert again.encoder.config == model.encoder.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert again.architectures == [f"JinaBert{_ENDINGS[head]}"]


_ENDINGS = {
    "masked_lm": "ForMaskedLM",
    "next_sentence": "ForNextSentencePrediction",
    "sequence_classification": "ForSequenceClassification",
    "token_classification": "ForTokenClassification",
    "span": "ForQuestionAnswering",
    "multiple_choice": "ForMultipleChoice",
}


@pytest.mark.parametrize("kind", [JinaBertConfig, JinaBertQkConfig])
@pytest.mark.parametrize("is_bare", [False, True])
def test_a_published_checkpoint_is_read(kind: type[JinaBertLikeConfig], is_bare: bool, tmp_path: Path) -> None:
    """Its config.json names BERT, and only the repository of its code tells the variants apart."""
    model = made(kind, ("pooler",) if is_bare else ("masked_lm",))
    save_model(model, None, tmp_path / "written")
    tensors = load_file(tmp_path / "written" / "model.safetensors")
    prefix = "bert." if is_bare else ""
    (tmp_path / "published").mkdir()
    save_file(
        {name.removeprefix(prefix): each for name, each in tensors.items()}, tmp_path / "published/model.safetensors"
    )
    code = {
        "AutoConfig": f"{kind.repository}--configuration_bert.JinaBertConfig",
        "AutoModelForMaskedLM": f"{kind.repository}--modeling_bert.JinaBertForMaskedLM",
    }
    contents = {**PUBLISHED, "auto_map": code, "_name_or_path": kind.repository}
    (tmp_path / "published" / "config.json").write_text(json.dumps(contents))
    again, report = load_model(tmp_path / "published")
    assert not report.missing
    assert not report.unexpected
    assert again.encoder.config == model.encoder.config
    assert again.heads == model.heads
    batch = batch_of(random_sequences())
    assert torch.equal(again(batch), model(batch))
    save_model(again, None, tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    kept = {key: value for key, value in contents.items() if key not in ("architectures", "auto_map", *_DROPPED)}
    assert {key: written[key] for key in kept} == kept
    assert code.items() <= written["auto_map"].items()


_DROPPED = ("torch_dtype", "use_cache")


def test_a_bert_with_alibi_is_never_read_as_bert(tmp_path: Path) -> None:
    """Nor is one with BERT's relative positions."""
    save_model(made(JinaBertConfig), None, tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    for kind in ("relative_key", "relative_key_query", "rotary"):
        (tmp_path / "config.json").write_text(json.dumps({**contents, "position_embedding_type": kind}))
        with pytest.raises(DataError, match=f"position_embedding_type is '{kind}'"):
            load_model(tmp_path)


@pytest.mark.parametrize("kind", [JinaBertConfig, JinaBertQkConfig])
def test_layers_are_removed_but_heads_are_not(kind: type[JinaBertLikeConfig], tmp_path: Path) -> None:
    model = made(kind)
    with pytest.raises(UsageError, match="slope"):
        prune_heads(model, {0: [1]})
    smaller = keep_layers(model, [0, 2])
    save_model(smaller, None, tmp_path)
    again, _ = load_model(tmp_path)
    batch = batch_of(random_sequences())
    assert torch.equal(again(batch), smaller(batch))


def test_an_lstm_on_its_features_is_read_back() -> None:
    """Its config.json contains the encoder's own, which names BERT if it is saved alone."""
    config = FeatureLstmConfig(base=JinaBertQkConfig(**SIZES), layers="last")
    assert FeatureLstmConfig.from_hub(config.to_hub()) == config


@pytest.mark.parametrize("kind", [JinaBertConfig, JinaBertQkConfig])
def test_weights_are_drawn_as_in_the_hubs_class(kind: type[EncoderConfig]) -> None:
    model = HeadedModel(kind.model_validate(SIZES).build(97, pad_id=5), ("masked_lm",))
    model.initialise(0)
    word = model.encoder.word_embedding.weight
    assert not word[5].any()
    assert word[6:].std().item() == pytest.approx(0.02, rel=0.05)
    assert word.abs().max() > 0.05
