"""MosaicBERT against a second implementation of its paper; `transformers` has no class for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families.reference_mosaicbert import hidden_states, logits, slope
from tests.models.from_equations import (
    EXACT,
    SIZES,
    TOLERANCE,
    VOCABULARY,
    assert_apart,
    random_model,
    random_sequences,
    saved_weights,
)

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.models.conversion.pruning import prune_heads
from bertkit.models.families.mosaicbert import MosaicBertConfig, alibi_slopes
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.dropout import Dropout
from bertkit.models.recorder import Recorder


def made(heads: tuple[str, ...] = ("masked_lm",), **changes: Any) -> HeadedModel:
    return random_model(MosaicBertConfig.model_validate({**SIZES, **changes}), heads=heads)


def batch_of(rows: list[list[int]]) -> PackedBatch:
    """The second half of each row is the second segment."""
    return PackedBatch.from_ids(rows, token_types=[[int(2 * i > len(row)) for i in range(len(row))] for row in rows])


@pytest.mark.parametrize("heads", [7, 6, 3])
def test_states_logits_and_gradients_are_those_of_the_papers_equations(heads: int, tmp_path: Path) -> None:
    # In double precision, because rounding differences in single precision depend on the processor.
    model, rows = made(num_attention_heads=heads).double(), random_sequences()
    config = model.encoder.config
    assert isinstance(config, MosaicBertConfig)
    weights, batch = saved_weights(model, tmp_path), batch_of(rows)
    points = ["blocks.0.hook_resid_pre", *(f"blocks.{layer}.hook_resid_post" for layer in range(3))]
    recorder = Recorder(points)
    ours_TV = model.masked_lm_logits(model(batch, recorder))
    lengths = [len(row) for row in rows]
    theirs = [
        hidden_states(weights, torch.tensor(row), types, config)
        for row, types in zip(rows, batch.token_types_T.split(lengths), strict=True)
    ]
    for number, point in enumerate(points):
        expected = torch.cat([states[number] for states in theirs])
        torch.testing.assert_close(recorder.kept[point], expected, **EXACT)
    theirs_TV = torch.cat([logits(weights, states[-1]) for states in theirs])
    torch.testing.assert_close(ours_TV, theirs_TV, **EXACT)

    ours_TV.square().mean().backward()
    theirs_TV.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = model.hub_form().to_hub({name: each for name, each in gradients.items() if each is not None})
    assert set(compared) == set(weights)
    for name, gradient in compared.items():
        torch.testing.assert_close(gradient, weights[name].grad, **EXACT, msg=name)


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 8, 12, 16, 20])
def test_slopes_are_geometric_and_those_of_the_papers_code(heads: int) -> None:
    assert alibi_slopes(heads) == pytest.approx([slope(head, heads) for head in range(heads)], rel=1e-12)


def test_eight_heads_have_the_slopes_that_the_paper_prints() -> None:
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def test_no_weight_depends_on_the_longest_sequence(tmp_path: Path) -> None:
    save_model(made(), None, tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**contents, "max_position_embeddings": 80}))
    longer, report = load_model(tmp_path)
    assert not report.missing
    assert longer(PackedBatch.from_ids(random_sequences([80]))).shape == (80, 42)


def test_selected_tokens_are_computed_alone_with_equal_states() -> None:
    model, batch = made(), batch_of(random_sequences())
    index_M = torch.tensor([3, 37, 40, 60])
    torch.testing.assert_close(model.encoder.forward_tokens(batch, index_M), model(batch)[index_M], **TOLERANCE)


@pytest.mark.parametrize("training", [False, True])
def test_one_sequence_never_sees_another(training: bool) -> None:
    model, rows = made().train(training), random_sequences([5, 17, 9, 37, 9])
    assert_apart(model, rows)


def test_dropout_stands_where_the_released_code_has_it() -> None:
    model = HeadedModel(MosaicBertConfig(**SIZES, hidden_dropout_prob=0.05).build(9), ("masked_lm",))
    rates = {name: part.rate for name, part in model.named_modules() if isinstance(part, Dropout) and part.rate}
    assert set(rates.values()) == {0.05}
    assert set(rates) == {
        "encoder.dropout",
        *(f"encoder.layers.{layer}.attention.output_dropout" for layer in range(3)),
        *(f"encoder.layers.{layer}.feed_forward.dropout" for layer in range(3)),
    }


def test_weights_are_drawn_as_in_the_hubs_class() -> None:
    model = HeadedModel(MosaicBertConfig(**SIZES).build(VOCABULARY, pad_id=5), ("masked_lm",))
    model.initialise(0)
    word = model.encoder.word_embedding.weight
    assert not word[5].any()
    assert word[6:].std().item() == pytest.approx(0.02, rel=0.05)
    assert word.abs().max() > 0.05


@pytest.mark.parametrize("head", list(MosaicBertConfig().heads()))
def test_what_is_saved_is_read_back(head: str, tmp_path: Path) -> None:
    model = made(heads=(head,))
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    assert again.encoder.config == model.encoder.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_published_checkpoint_is_read(tmp_path: Path) -> None:
    """Its config names BERT, and the file contains the tied matrix twice."""
    model = made()
    save_model(model, None, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    contents = json.loads((tmp_path / "config.json").read_text())
    assert contents["alibi_starting_size"] == 37
    published = {**contents, "model_type": "bert", "position_embedding_type": "absolute"}
    (tmp_path / "config.json").write_text(json.dumps(published))
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    batch = batch_of(random_sequences())
    assert torch.equal(again(batch), model(batch))


def test_heads_whose_slopes_follow_from_their_number_are_not_pruned() -> None:
    with pytest.raises(UsageError, match="slope"):
        prune_heads(made(), {0: [1]})
