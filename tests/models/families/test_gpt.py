"""GPT and GPT-2: the class with two heads, causality, old files, and the initial weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tests.models.cases.gpt import CASES
from tests.models.oracle import LENGTHS, Case, make_inputs, make_oracle, make_twins
from tests.models.test_families import TOLERANCE, assert_gradients_equal, read_back
from tests.tasks.tiny_task import tiny_tokenizer

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.families.gpt import GptConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.files.hub import config_json, load_model, save_model
from bertkit.models.headed import HeadedModel

pytest.importorskip("transformers")

DOUBLE_HEADS = {"openai-gpt": "OpenAIGPTDoubleHeadsModel", "gpt2": "GPT2DoubleHeadsModel"}
BOTH = [case for case in CASES if case.name in DOUBLE_HEADS]


def ask_double_heads(oracle: Any, padded: dict[str, torch.Tensor]) -> Any:
    return oracle(**padded, mc_token_ids=padded["attention_mask"].sum(dim=1) - 1)


@pytest.mark.parametrize("case", BOTH, ids=str)
def test_language_model_and_multiple_choice_equal_the_class_with_both(case: Case, tmp_path: Path) -> None:
    architecture = DOUBLE_HEADS[case.name]
    twins = make_twins(case, architecture, tmp_path / "theirs")
    model = twins.model
    assert model.head_names == ("causal_lm", "multiple_choice")
    assert model.architectures == [architecture]
    inputs = make_inputs(case, model)
    outputs = ask_double_heads(twins.oracle, inputs.padded)
    hidden_TD = model(inputs.batch)
    words_TV = model.logits("causal_lm", hidden_TD, inputs.batch)
    choices_B1 = model.logits("multiple_choice", hidden_TD, inputs.batch)
    expected_TV = outputs.logits[inputs.real_BS]
    torch.testing.assert_close(words_TV, expected_TV, **TOLERANCE)
    torch.testing.assert_close(choices_B1, outputs.mc_logits[:, None], **TOLERANCE)
    (words_TV.square().mean() + choices_B1.square().mean()).backward()
    (expected_TV.square().mean() + outputs.mc_logits.square().mean()).backward()
    assert_gradients_equal(model, twins.oracle)

    save_model(model, None, tmp_path / "ours")
    again = read_back(tmp_path / "ours", architecture)
    with torch.no_grad():
        torch.testing.assert_close(ask_double_heads(again, inputs.padded).mc_logits, outputs.mc_logits)


@pytest.mark.parametrize("case", BOTH, ids=str)
def test_no_token_sees_a_later_one(case: Case, tmp_path: Path) -> None:
    model = make_twins(case, case.heads["causal_lm"], tmp_path).model
    rows = [part.tolist() for part in make_inputs(case, model).batch.ids_T.split(LENGTHS)]
    changed = [[*row[:-1], (row[-1] + 1) % 97] for row in rows]
    last_T = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    last_T[torch.tensor(LENGTHS).cumsum(0) - 1] = True
    before_TD, after_TD = model(PackedBatch.from_ids(rows)), model(PackedBatch.from_ids(changed))
    assert torch.equal(before_TD[~last_T], after_TD[~last_T])
    assert (before_TD[last_T] != after_TD[last_T]).any(dim=1).all()


def test_an_old_file_with_masks_and_without_prefix_loads(tmp_path: Path) -> None:
    """The first GPT-2 files name no prefix although they contain the language model, and include the causal mask."""
    case = BOTH[-1]
    oracle = make_oracle(case, "GPT2LMHeadModel")
    oracle.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 19, 19).tril() for layer in range(2)}
    save_file({**tensors, **masks}, path)
    model, report = load_model(tmp_path)
    assert model.head_names == ("causal_lm",)
    assert not report.missing
    assert not report.unexpected
    inputs = make_inputs(case, model)
    expected = oracle(**inputs.padded).logits[inputs.real_BS]
    logits_TV = model.logits("causal_lm", model(inputs.batch), inputs.batch)
    torch.testing.assert_close(logits_TV, expected, **TOLERANCE)


def test_gelu_means_the_approximation_in_a_config_of_gpt(tmp_path: Path) -> None:
    assert GptConfig.from_hub({"afn": "gelu"}).hidden_act == "gelu_new"
    assert GptConfig.from_hub({}).hidden_act == "gelu_new"
    assert GptConfig().to_hub()["afn"] == "gelu"


def test_a_feed_forward_width_that_a_config_of_gpt_cannot_say_is_refused() -> None:
    with pytest.raises(ValidationError, match="4 times hidden_size"):
        GptConfig(hidden_size=24, num_attention_heads=3)


def test_another_summary_is_refused_where_it_is_read(tmp_path: Path) -> None:
    make_oracle(BOTH[-1], "GPT2LMHeadModel").save_pretrained(tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**contents, "summary_activation": "tanh"}))
    with pytest.raises(DataError, match=r"summary_activation is 'tanh'; only None .* for the head multiple_choice"):
        load_model(tmp_path, heads=("multiple_choice",))
    language_model, _ = load_model(tmp_path)
    assert language_model.head_names == ("causal_lm",)
    assert config_json(language_model, None)["summary_activation"] == "tanh"


def test_initial_weights_of_gpt2_are_narrower_where_they_add_to_the_residual_stream() -> None:
    config = Gpt2Config(hidden_size=96, num_hidden_layers=8, num_attention_heads=3, intermediate_size=384)
    model = HeadedModel(config.build(301), ("causal_lm",))
    model.initialise(seed=3)
    parameters = dict(model.named_parameters())
    for name, std in {
        "embeddings.word": 0.02,
        "embeddings.position": 0.01,
        "layers.7.attention.query": 0.02,
        "layers.7.attention.output": 0.02 / math.sqrt(16),
        "layers.0.feed_forward.inner": 0.02,
        "layers.0.feed_forward.outer": 0.02 / math.sqrt(16),
    }.items():
        assert parameters[f"encoder.{name}.weight"].std().item() == pytest.approx(std, rel=0.03)


def test_a_gpt2_with_a_vocabulary_of_its_own_names_the_ends_of_its_texts() -> None:
    """Otherwise the Hub's class would use GPT-2's, which are outside this vocabulary."""
    tokenizer = tiny_tokenizer()
    config = Gpt2Config(hidden_size=12, num_hidden_layers=1, num_attention_heads=2)
    contents = config_json(HeadedModel(config.build(tokenizer.vocab_size), ("causal_lm",)), tokenizer)
    assert (contents["bos_token_id"], contents["eos_token_id"]) == (tokenizer.cls_id, tokenizer.sep_id)
