"""T5's encoder alone against `T5EncoderModel`, and whole directories against sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.models.from_equations import TOLERANCE, assert_apart, random_model, random_sequences
from tests.models.test_encoder_decoder import T5_SIZES, redrawn
from tests.tasks.tiny_task import tiny_tokenizer
from transformers import T5Config as TheirConfig
from transformers import T5EncoderModel, T5ForTokenClassification

import bertkit
from bertkit.data.batch import PackedBatch
from bertkit.models.conversion.pruning import keep_layers
from bertkit.models.families.t5 import T5Config
from bertkit.models.families.t5_encoder import T5EncoderConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder
from bertkit.text.tokenizer_files import save_tokenizer

forms = pytest.mark.parametrize("form", ["relu", "gated-gelu"])


def oracle(kind: Any, form: str, vocabulary: int = 97) -> Any:
    sizes = {**T5_SIZES, "feed_forward_proj": form, "num_labels": 3, "vocab_size": vocabulary}
    return redrawn(kind(TheirConfig(**sizes, attn_implementation="eager")))


def of_rows(model: Any, rows: list[list[int]], **settings: Any) -> Any:
    """The outputs of the original for each row alone."""
    return [model(input_ids=torch.tensor([row]), **settings) for row in rows]


@forms
def test_states_and_gradients_are_those_of_the_original(form: str, tmp_path: Path) -> None:
    theirs, rows = oracle(T5EncoderModel, form), random_sequences()
    theirs.save_pretrained(tmp_path)
    model, report = load_model(tmp_path)
    assert isinstance(model.encoder.config, T5EncoderConfig)
    assert not report.missing
    assert not report.unexpected
    recorder = Recorder([f"blocks.{layer}.hook_resid_pre" for layer in range(2)])
    ours_TD = model(PackedBatch.from_ids(rows), recorder)
    outputs = of_rows(theirs, rows, output_hidden_states=True)
    for layer in range(2):
        expected = torch.cat([each.hidden_states[layer][0] for each in outputs])
        torch.testing.assert_close(recorder.kept[f"blocks.{layer}.hook_resid_pre"], expected, **TOLERANCE)
    theirs_TD = torch.cat([each.last_hidden_state[0] for each in outputs])
    torch.testing.assert_close(ours_TD, theirs_TD, **TOLERANCE)
    ours_TD.square().mean().backward()
    theirs_TD.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = model.hub_form().to_hub({name: each for name, each in gradients.items() if each is not None})
    originals = dict(theirs.named_parameters())
    assert {name.removeprefix("transformer.") for name in compared} == originals.keys()
    for name, gradient in compared.items():
        expected = originals[name.removeprefix("transformer.")].grad
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6, msg=name)


@forms
def test_the_original_reads_what_is_written(form: str, tmp_path: Path) -> None:
    oracle(T5EncoderModel, form).save_pretrained(tmp_path / "theirs")
    model, rows = load_model(tmp_path / "theirs")[0], random_sequences()
    save_model(model, None, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("t5", ["T5EncoderModel"])
    again, info = T5EncoderModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    theirs_TD = torch.cat([each.last_hidden_state[0] for each in of_rows(again, rows)])
    torch.testing.assert_close(model(PackedBatch.from_ids(rows)), theirs_TD, **TOLERANCE)


def test_labels_of_tokens_are_those_of_the_original(tmp_path: Path) -> None:
    theirs, rows = oracle(T5ForTokenClassification, "relu"), random_sequences()
    theirs.save_pretrained(tmp_path)
    model, report = load_model(tmp_path)
    assert (model.head_names, report.missing) == (("token_classification",), [])
    batch = PackedBatch.from_ids(rows)
    expected = torch.cat([each.logits[0] for each in of_rows(theirs, rows)])
    torch.testing.assert_close(model.logits("token_classification", model(batch), batch), expected, **TOLERANCE)
    save_model(model, None, tmp_path / "ours")
    again = T5ForTokenClassification.from_pretrained(tmp_path / "ours")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_head_for_sequences_reads_the_mean_and_comes_back(tmp_path: Path) -> None:
    config = T5EncoderConfig(hidden_size=36, head_width=7, num_attention_heads=3, num_hidden_layers=2)
    model, batch = random_model(config, heads=("sequence_classification",)), PackedBatch.from_ids(random_sequences())
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert not report.missing
    assert again.encoder.config == config
    assert again.head_names == ("sequence_classification",)
    hidden_TD = model(batch)
    output = model.get_submodule("sequence_classification.output")
    expected = torch.stack([output(rows.mean(dim=0)) for rows in hidden_TD.split([len(r) for r in random_sequences()])])
    torch.testing.assert_close(again.logits("sequence_classification", again(batch), batch), expected, **TOLERANCE)


def test_layers_are_removed_and_sequences_stay_apart(tmp_path: Path) -> None:
    config = T5EncoderConfig(hidden_size=36, head_width=7, num_attention_heads=3, num_hidden_layers=3)
    model, batch = random_model(config, heads=()), PackedBatch.from_ids(random_sequences())
    assert_apart(model, random_sequences([5, 17, 9, 37, 9]))
    index_M = torch.tensor([3, 37, 40, 60])
    torch.testing.assert_close(model.encoder.forward_tokens(batch, index_M), model(batch)[index_M], **TOLERANCE)
    smaller = keep_layers(model, [1, 2])
    save_model(smaller, None, tmp_path)
    assert torch.equal(load_model(tmp_path)[0](batch), smaller(batch))


def test_initial_weights_are_those_of_the_whole_model() -> None:
    sizes: dict[str, Any] = {"hidden_size": 36, "head_width": 7, "num_attention_heads": 3, "num_hidden_layers": 2}
    models = [HeadedModel(config(**sizes).build(97), ()) for config in (T5Config, T5EncoderConfig)]
    for model in models:
        model.initialise(0)
    whole, own = (dict(model.named_parameters()) for model in models)
    for name, parameter in own.items():
        other = whole[name.replace("encoder.norm", "encoder.source_norm").replace("encoder.dis", "encoder.source_dis")]
        scale = float(other.std() / parameter.std()) if parameter.std() else 1.0
        assert scale == pytest.approx(1, abs=0.2), name


@pytest.mark.parametrize("modules", ["sentence-t5", "gtr"])
def test_a_directory_of_sentence_transformers_has_the_same_vectors(modules: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import modules as parts

    tokenizer = tiny_tokenizer()
    oracle(T5EncoderModel, "relu", tokenizer.vocab_size).save_pretrained(tmp_path / "t5")
    save_tokenizer(tokenizer, tmp_path / "t5")
    encoder = parts.Transformer(str(tmp_path / "t5"), max_seq_length=20)
    pooling, dense = parts.Pooling(36, "mean"), parts.Dense(36, 23, bias=False, activation_function=torch.nn.Identity())
    rest = [dense, parts.Normalize()] if modules == "sentence-t5" else [parts.Normalize()]
    theirs = library.SentenceTransformer(modules=[encoder, pooling, *rest], device="cpu")
    theirs.save(str(tmp_path / "theirs"))
    names = load_file(tmp_path / "theirs" / "model.safetensors").keys()
    assert all(name.startswith(("shared.", "encoder.")) for name in names)
    texts = ["a cat", "", "the fine matrix of words ! " * 9, "list of numbers , warm"]
    found = bertkit.load(tmp_path / "theirs", device="cpu").encode(texts)
    np.testing.assert_allclose(found, theirs.encode(texts), atol=1e-5)
