"""UltraBERT's files with windows and rotary bases layer by layer, and its windows in long texts. Everything else is in
test_families.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.from_equations import SIZES, random_model

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.conversion.pruning import keep_layers
from bertkit.models.families.ultrabert import UltraBertConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel

transformers = pytest.importorskip("transformers")

LENGTH = 200
SETTINGS: dict[str, Any] = {
    **SIZES,
    "max_position_embeddings": LENGTH,
    "num_key_value_heads": 7,
    "prediction_head_size": 23,
    "sliding_window": 5,
    "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
    "global_rope_theta": 111.0,
    "local_rope_theta": 77.0,
}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def write_older_files(model: HeadedModel, directory: Path, **changes: Any) -> None:
    save_model(model, None, directory)
    tensors = load_file(directory / "model.safetensors")
    older = {name.replace("model.", "ultrabert.").replace("head.decoder.", "cls."): tensors[name] for name in tensors}
    save_file(older, directory / "model.safetensors")
    contents = json.loads((directory / "config.json").read_text())
    for key in ("layer_types", "rope_parameters", "sliding_window"):
        del contents[key]
    windows = {"attention_windows": [5, 0, 5], "rope_theta": [77.0, 111.0, 77.0]}
    (directory / "config.json").write_text(json.dumps({**contents, **windows, **changes}))


def logits_of(model: HeadedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.masked_lm_logits(model(PackedBatch.from_ids([ids.tolist()])))


def test_older_files_are_read_as_by_the_hubs_class_and_written_in_the_newer_form(tmp_path: Path) -> None:
    """The text is many windows long."""
    model = random_model(UltraBertConfig(**SETTINGS))
    write_older_files(model, tmp_path)
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    assert again.encoder.config == model.encoder.config
    ids = torch.arange(LENGTH) % 90
    oracle = transformers.UltrabertForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(logits_of(again, ids), oracle(ids[None]).logits[0], **TOLERANCE)
    smaller = keep_layers(again, [0, 2])
    save_model(smaller, None, tmp_path / "newer")
    newer, _ = load_model(tmp_path / "newer")
    assert torch.equal(logits_of(newer, ids), logits_of(smaller, ids))
    oracle = transformers.UltrabertForMaskedLM.from_pretrained(tmp_path / "newer", attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(logits_of(smaller, ids), oracle(ids[None]).logits[0], **TOLERANCE)


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention_windows", [5, 0, 7]), ("rope_theta", [77.0, 111.0, 78.0]), ("head_dim", 8)],
)
def test_what_no_setting_expresses_is_refused(key: str, value: object, tmp_path: Path) -> None:
    write_older_files(random_model(UltraBertConfig(**SETTINGS)), tmp_path, **{key: value})
    with pytest.raises(DataError, match=key):
        load_model(tmp_path)


def test_a_local_layer_sees_as_many_tokens_on_either_side(tmp_path: Path) -> None:
    config = UltraBertConfig(**{**SETTINGS, "num_hidden_layers": 1, "layer_types": ("sliding_attention",)})
    model = random_model(config)
    ids = torch.arange(30)
    changed = ids.clone()
    changed[10] = 95
    differs = (logits_of(model, ids) != logits_of(model, changed)).any(dim=1)
    assert differs.nonzero().flatten().tolist() == list(range(5, 16))
