"""GTE's files of Alibaba-NLP/new-impl, and its scaled positions. Everything else is in test_families.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.from_equations import SIZES, random_model, random_sequences
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.families.gte import Gte, GteConfig
from bertkit.models.files.hub import load_model, save_model

transformers = pytest.importorskip("transformers")

PUBLISHED: dict[str, Any] = {
    "model_type": "new",
    "architectures": ["NewModel"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 42,
    "intermediate_size": 51,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 37,
    "num_attention_heads": 7,
    "num_hidden_layers": 3,
    "pack_qkv": True,
    "pad_token_id": 0,
    "position_embedding_type": "rope",
    "rope_scaling": None,
    "rope_theta": 500,
    "type_vocab_size": 2,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "vocab_size": 97,
}
FACTOR, HEAD_WIDTH = 8.0, 6
SETTINGS = {**SIZES, "rope_theta": 500.0}
OLDER = {
    "self_attn.o_proj": "attention.o_proj",
    "post_attention_layernorm": "attn_ln",
    "post_mlp_layernorm": "mlp_ln",
    "mlp.down_proj": "mlp.down_proj",
}


def in_older_form(tensors: dict[str, Tensor], prefix: str, *, pack: bool) -> dict[str, Tensor]:
    """With new-impl's names; queries, keys and values are one matrix if `pack`."""
    found = {}
    for layer in range(3):
        stem, older = f"gte.layers.{layer}.", f"{prefix}encoder.layer.{layer}."
        for leaf in ("weight", "bias"):
            parts = [tensors.pop(f"{stem}self_attn.{part}_proj.{leaf}") for part in "qkv"]
            named = zip("qkv", parts, strict=True)
            found |= (
                {f"{older}attention.qkv_proj.{leaf}": torch.cat(parts)}
                if pack
                else {f"{older}attention.{part}_proj.{leaf}": tensor for part, tensor in named}
            )
        up_then_gate = [tensors.pop(f"{stem}mlp.{part}_proj.weight") for part in ("up", "gate")]
        found[f"{older}mlp.up_gate_proj.weight"] = torch.cat(up_then_gate)
        for name in [name for name in tensors if name.startswith(stem)]:
            module, _, leaf = name.removeprefix(stem).rpartition(".")
            found[f"{older}{OLDER[module]}.{leaf}"] = tensors.pop(name)
    for name, tensor in tensors.items():
        found[name.replace("gte.", prefix).replace("lm_head.layer_norm", "lm_head.norm")] = tensor
    return found


def write_published(directory: Path, tensors: dict[str, Tensor], **changes: Any) -> None:
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(PUBLISHED | changes))


@pytest.mark.parametrize(
    ("heads", "prefix", "pack", "changes"),
    [
        pytest.param((), "", True, {"type_vocab_size": 0}, id="gte-base-en-v1.5"),
        pytest.param((), "", True, {"model_type": "gte", "architectures": ["GteModel"]}, id="arctic-embed-m-v2.0"),
        pytest.param(("pooler",), "", False, {"pack_qkv": False}, id="pooler"),
        pytest.param(("masked_lm",), "new.", True, {"architectures": ["NewForMaskedLM"]}, id="gte-mlm"),
        pytest.param(
            ("sequence_classification",),
            "new.",
            True,
            {"architectures": ["NewForSequenceClassification"]},
            id="reranker",
        ),
        pytest.param(
            ("token_classification",),
            "new.",
            True,
            {"architectures": ["NewModel", "NewForTokenClassification"]},
            id="gte-multilingual-base",
        ),
    ],
)
def test_a_published_checkpoint_is_read_and_written_in_the_newer_form(
    heads: tuple[str, ...], prefix: str, pack: bool, changes: dict[str, Any], tmp_path: Path
) -> None:
    types = changes.get("type_vocab_size", 2)
    model = random_model(GteConfig(**{**SETTINGS, "type_vocab_size": types}), heads=heads)
    save_model(model, None, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    write_published(tmp_path, in_older_form(dict(tensors), prefix, pack=pack), **changes)
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    assert again.heads == model.heads
    assert again.encoder.config.model_dump() == {**model.encoder.config.model_dump(), "hidden_dropout_prob": 0.1}
    batch = PackedBatch.from_ids(random_sequences())
    assert torch.equal(again(batch), model(batch))
    save_model(again, None, tmp_path / "newer")
    newer = json.loads((tmp_path / "newer" / "config.json").read_text())
    assert newer["model_type"] == "gte"
    assert "auto_map" not in newer
    written = load_file(tmp_path / "newer" / "model.safetensors")
    assert set(written) == set(tensors)
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def test_the_hubs_class_reads_the_older_names_in_the_same_way(tmp_path: Path) -> None:
    model = random_model(GteConfig(**SETTINGS))
    save_model(model, None, tmp_path)
    tensors = in_older_form(load_file(tmp_path / "model.safetensors"), "new.", pack=True)
    save_file(tensors, tmp_path / "model.safetensors")
    oracle = transformers.GteForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = torch.arange(1, 31)
    batch = PackedBatch.from_ids([ids.tolist()])
    again, _ = load_model(tmp_path)
    with torch.no_grad():
        logits = again.masked_lm_logits(again(batch))
        torch.testing.assert_close(logits, oracle(ids[None]).logits[0], rtol=1e-5, atol=1e-5)


def test_scaled_positions_are_new_impls_and_those_of_the_hubs_class(tmp_path: Path) -> None:
    """inv_freq_i = (theta factor)^(-2i/H) / factor^(2/H), at every length."""
    model = random_model(GteConfig(**SETTINGS), heads=())
    save_model(model, None, tmp_path)
    tensors = in_older_form(load_file(tmp_path / "model.safetensors"), "", pack=True)
    write_published(tmp_path, tensors, type_vocab_size=1, rope_scaling={"type": "ntk", "factor": FACTOR})
    scaled, _ = load_model(tmp_path)
    assert isinstance(scaled.encoder, Gte)
    frequencies = [(500 * FACTOR) ** (-2 * i / HEAD_WIDTH) / FACTOR ** (2 / HEAD_WIDTH) for i in range(HEAD_WIDTH // 2)]
    ids = torch.arange(1, 31)
    batch = PackedBatch.from_ids([ids.tolist()])
    (table, *_) = scaled.encoder.tables(batch)
    expected_TH = torch.arange(30.0)[:, None] * torch.tensor(frequencies)
    torch.testing.assert_close(table.sine_T1H[:, 0], expected_TH.sin(), rtol=1e-5, atol=1e-5)

    save_model(scaled, None, tmp_path / "newer")
    oracle = transformers.GteModel.from_pretrained(tmp_path / "newer", attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(scaled(batch), oracle(ids[None]).last_hidden_state[0], rtol=1e-5, atol=1e-5)
    again, _ = load_model(tmp_path / "newer")
    assert again.encoder.config == scaled.encoder.config
    assert not torch.allclose(scaled(batch), model(batch), atol=1e-2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logn_attention_scale", True),
        ("layer_norm_type", "rms_norm"),
        ("position_embedding_type", "absolute"),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("rope_scaling", {"type": "ntk", "factor": 2.0, "mixed_b": 0.625}),
    ],
)
def test_other_models_of_the_code_are_refused(key: str, value: object, tmp_path: Path) -> None:
    write_published(tmp_path, {"word": torch.zeros(1)}, **{key: value})
    with pytest.raises(DataError, match=key):
        load_model(tmp_path)


def test_an_early_config_has_new_impls_defaults(tmp_path: Path) -> None:
    known = {key: value for key, value in PUBLISHED.items() if key not in ("rope_theta", "max_position_embeddings")}
    config = GteConfig.from_hub(known)
    assert (config.rope_theta, config.max_position_embeddings) == (10_000, 2048)
