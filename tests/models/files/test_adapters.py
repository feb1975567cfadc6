"""Adapters of PEFT, merged into their models: the formula, names, labels, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertkit.cache import KINDS
from bertkit.errors import DataError
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.files.hub import find_model, load_model, save_model
from bertkit.models.files.model_files import ADAPTERS
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels

WIDTH, RANK = 12, 2
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 17,
}
QUERY = "encoder.layer.0.attention.self.query"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path / "cache"))


def saved(path: Path, heads: tuple[str, ...] = ("masked_lm",), config: Any = None) -> Path:
    model = HeadedModel((config or BertConfig(**SIZES)).build(23), heads, labels=Labels(("no", "yes")))
    model.initialise(3)
    save_model(model, None, path)
    return path


def update_of(seed: int, outputs: int = WIDTH, inputs: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator)


def adapter(path: Path, base: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    """An adapter as PEFT writes it."""
    path.mkdir()
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, path / "adapter_model.safetensors"
    )
    common = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": RANK, "lora_alpha": 6}
    (path / "adapter_config.json").write_text(json.dumps(common | settings))
    return path


def of_query(down: Tensor, up: Tensor, prefix: str = "bert.") -> dict[str, Tensor]:
    return {f"{prefix}{QUERY}.lora_A.weight": down, f"{prefix}{QUERY}.lora_B.weight": up}


def weight(directory: Path, name: str) -> Tensor:
    return load_file(directory / "model.safetensors")[name]


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 6 / RANK),
        ({"use_rslora": True}, 6 / math.sqrt(RANK)),
        ({"alpha_pattern": {"layer.0.attention.self.query": 4, "key": 1}}, 4 / RANK),
        ({"alpha_pattern": {"layer.1.attention.self.query": 4}}, 6 / RANK),
    ],
)
@pytest.mark.parametrize("prefix", ["bert.", ""])
def test_a_low_rank_update_is_added_to_its_weight_and_to_no_other(
    settings: dict[str, Any], scale: float, prefix: str, tmp_path: Path
) -> None:
    """`AutoModel` has names without the prefix of a class with a head."""
    base, (down, up) = saved(tmp_path / "base"), update_of(1)
    merged = find_model(str(adapter(tmp_path / "a", base, of_query(down, up, prefix), **settings)))
    before, after = (load_file(each / "model.safetensors") for each in (base, merged))
    changed = f"bert.{QUERY}.weight"
    torch.testing.assert_close(after.pop(changed), before.pop(changed) + scale * (up @ down))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_dora_gives_the_rows_of_the_sum_the_lengths_of_a_vector(tmp_path: Path) -> None:
    base, (down, up) = saved(tmp_path / "base"), update_of(1)
    lengths = torch.rand(WIDTH) + 0.5
    tensors = of_query(down, up) | {f"bert.{QUERY}.lora_magnitude_vector": lengths}
    merged = find_model(str(adapter(tmp_path / "a", base, tensors, use_dora=True)))
    found, whole = (weight(each, f"bert.{QUERY}.weight") for each in (merged, base))
    whole = whole + 3 * (up @ down)
    torch.testing.assert_close(found.norm(dim=1), lengths)
    torch.testing.assert_close(torch.cosine_similarity(found, whole, dim=1), torch.ones(WIDTH))


def test_gpt2s_maps_are_stored_the_other_way_round(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", ("causal_lm",), Gpt2Config(**SIZES))
    down, up = update_of(1)
    name = "transformer.h.0.attn.c_proj"
    tensors = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    merged = find_model(str(adapter(tmp_path / "a", base, tensors, fan_in_fan_out=True)))
    torch.testing.assert_close(weight(merged, f"{name}.weight"), weight(base, f"{name}.weight") + 3 * (up @ down).T)


@pytest.mark.parametrize("rows", [2, 4])
def test_the_head_and_biases_of_an_adapter_are_whole_and_set_class_and_labels(rows: int, tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    head = {"classifier.weight": torch.rand(rows, WIDTH), "classifier.bias": torch.rand(rows)}
    bias = torch.rand(WIDTH)
    others = {
        "classifier.modules_to_save.bias": head["classifier.bias"].clone(),
        "classifier.original_module.bias": torch.zeros(rows),
        f"bert.{QUERY}.base_layer.bias": bias,
        "bert.pooler.dense.weight": torch.rand(WIDTH, WIDTH),
        "bert.pooler.dense.bias": torch.rand(WIDTH),
    }
    trained = adapter(tmp_path / "a", base, of_query(*update_of(1)) | head | others, task_type="SEQ_CLS")
    merged = find_model(str(trained))
    model, report = load_model(merged, heads=("sequence_classification",))
    assert not report.missing
    assert model.labels.names == (("no", "yes") if rows == 2 else tuple(f"LABEL_{n}" for n in range(4)))
    assert json.loads((merged / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]
    torch.testing.assert_close(weight(merged, "classifier.bias"), head["classifier.bias"])
    torch.testing.assert_close(weight(merged, f"bert.{QUERY}.bias"), bias)


def test_a_merged_model_is_made_once_for_the_same_files_and_has_the_adapters_tokenizer(tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    (base / "vocab.txt").write_text("of the model")
    trained = adapter(tmp_path / "a", base, of_query(*update_of(1)))
    first = find_model(str(trained))
    assert first.parent == tmp_path / "cache" / ADAPTERS
    assert ADAPTERS in KINDS
    assert (first / "vocab.txt").read_text() == "of the model"
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert find_model(str(trained)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    (trained / "vocab.txt").write_text("of the adapter")
    second = find_model(str(trained))
    assert second != first
    assert (second / "vocab.txt").read_text() == "of the adapter"
    assert not (second / "adapter_config.json").exists()


def test_an_embedder_that_is_an_adapter_keeps_its_modules(tmp_path: Path) -> None:
    """As sentence-transformers writes it: modules beside adapter_config.json, the encoder elsewhere."""
    base, (down, up) = saved(tmp_path / "base"), update_of(1)
    trained = adapter(tmp_path / "a", base, of_query(down, up, ""))
    (trained / "modules.json").write_text("[]")
    (trained / "1_Pooling").mkdir()
    (trained / "1_Pooling" / "config.json").write_text("{}")
    merged = find_model(str(trained))
    assert (merged / "1_Pooling" / "config.json").read_text() == "{}"
    assert (merged / "modules.json").is_file()


def test_an_adapter_below_a_place_without_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    adapter(tmp_path / "out" / "checkpoint-60", saved(tmp_path / "base"), of_query(*update_of(1)))
    with pytest.raises(DataError, match=r"no model here.*: give a checkpoint, such as .*checkpoint-60$"):
        find_model(str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA can be read; merge it into its model with PEFT"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which cannot be read; merge"),
        ({"target_parameters": ["x"]}, "target_parameters is"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path must name the model"),
        ({"base_model_name_or_path": "./nowhere"}, r"base_model_name_or_path: \./nowhere: does not exist"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = saved(tmp_path / "base")
    with pytest.raises(DataError, match=message):
        find_model(str(adapter(tmp_path / "a", base, of_query(*update_of(1)), **settings)))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (of_query(*update_of(1), prefix="roberta."), f"roberta.{QUERY} is not in the adapter's model"),
        (of_query(*update_of(1, outputs=5)), f"bert.{QUERY} does not fit the adapter's model"),
        (of_query(*update_of(1, inputs=5)), f"bert.{QUERY} does not fit the adapter's model"),
        ({f"bert.{QUERY}.lora_A.weight": torch.rand(2, 12)}, "does not fit the adapter's model: KeyError"),
        ({"bert.embeddings.word_embeddings.lora_embedding_A": torch.rand(2, 23)}, "is an embedding"),
    ],
)
def test_an_adapter_of_another_model_is_refused(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        find_model(str(adapter(tmp_path / "a", saved(tmp_path / "base"), tensors)))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
