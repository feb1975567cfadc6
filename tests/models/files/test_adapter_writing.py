"""Updates of LoRA as an adapter of PEFT: reading it gives the model into which they were merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.finetuning.methods.lora import Lora
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.distilbert import DistilBertConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.models.families.xlnet import XlnetConfig
from bertkit.models.files.adapter_writing import write_adapter
from bertkit.models.files.hub import find_model, load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels

LABELS = Labels(("no", "perhaps", "yes"))
HEAD = "sequence_classification"
SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 17,
}


def adapted(base: Path, config: Any, method: Lora) -> tuple[HeadedModel, dict[str, Any]]:
    """A model with updates that were merged into it, and what `write_adapter` needs."""
    plain = HeadedModel(config.build(23))
    plain.initialise(3)
    save_model(plain, None, base)
    model, _ = load_model(base, heads=(HEAD,), labels=LABELS, new=(HEAD,))
    method.prepare(model, seed=1)
    torch.manual_seed(2)
    for update in (found := method.updates(model)).values():
        torch.nn.init.normal_(update.up_FR)
    method.finish(model)
    return model, {"updates": found, "scale": method.alpha / method.rank, "base": str(base)}


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        (BertConfig(**SIZES), ("query", "value")),
        (RobertaConfig(**SIZES), ("query", "inner", "outer")),
        (DistilBertConfig(**SIZES), ("query", "value")),
        (ModernBertConfig(**SIZES), ("query", "value")),  # one matrix for queries, keys and values
        (ModernBertConfig(**SIZES), ("value", "key", "query", "output")),
        (Gpt2Config(**SIZES), ("query", "value")),  # likewise, transposed
    ],
)
def test_an_adapter_is_the_merged_model(config: Any, targets: tuple[str, ...], tmp_path: Path) -> None:
    model, more = adapted(tmp_path / "base", config, Lora(rank=2, alpha=3, targets=targets))
    assert write_adapter(model, directory=tmp_path / "adapter", **more)
    again, report = load_model(find_model(str(tmp_path / "adapter")))
    assert not report.newly_initialised
    assert again.labels == LABELS
    own, read = model.own_state_dict(), again.own_state_dict()
    assert own.keys() == read.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(read[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_what_is_no_matrix_in_files_has_no_adapter(tmp_path: Path) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "max_position_embeddings"}
    model, more = adapted(tmp_path / "base", XlnetConfig(**sizes), Lora(rank=2))
    assert not write_adapter(model, directory=tmp_path / "adapter", **more)
    assert not (tmp_path / "adapter").exists()


def test_the_settings_are_those_of_peft(tmp_path: Path) -> None:
    model, more = adapted(tmp_path / "base", BertConfig(**SIZES), Lora(rank=2, alpha=3, targets=("query",)))
    write_adapter(model, directory=tmp_path / "adapter", **more)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    names = [f"bert.encoder.layer.{number}.attention.self.query" for number in range(2)]
    assert settings["target_modules"] == names
    assert settings["modules_to_save"] == ["bert.pooler.dense", "classifier"]
    assert (settings["r"], settings["lora_alpha"], settings["task_type"]) == (2, 3.0, "SEQ_CLS")
