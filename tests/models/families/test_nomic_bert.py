"""Nomic BERT's files of before `transformers` had a class for it. Everything else is in test_families.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.from_equations import SIZES, random_model, random_sequences

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.conversion.pruning import keep_layers
from bertkit.models.families.nomic_bert import NomicBertConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel

OLDER_CONFIG = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "activation_function": "swiglu",
    "attn_pdrop": 0.0,
    "causal": False,
    "embd_pdrop": 0.0,
    "fused_bias_fc": True,
    "layer_norm_epsilon": 1e-12,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 42,
    "n_head": 7,
    "n_inner": 51,
    "n_layer": 3,
    "n_positions": 37,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 97,
}
LAYER = {
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}


def write_older_files(model: HeadedModel, directory: Path, prefix: str, **changes: Any) -> None:
    """The model with the names that contrastors writes."""
    save_model(model, None, directory)
    tensors = load_file(directory / "model.safetensors")
    older = {}
    for layer in range(3):
        stem = f"nomic_bert.layers.{layer}."
        parts = [tensors.pop(f"{stem}self_attn.{part}_proj.weight") for part in ("q", "k", "v")]
        older[f"{prefix}encoder.layers.{layer}.attn.Wqkv.weight"] = torch.cat(parts)
        for name in [name for name in tensors if name.startswith(stem)]:
            module, _, leaf = name.removeprefix(stem).rpartition(".")
            older[f"{prefix}encoder.layers.{layer}.{LAYER[module]}.{leaf}"] = tensors.pop(name)
    for name, tensor in tensors.items():
        own = name.replace("embeddings.LayerNorm", "emb_ln")
        older[own.replace("nomic_bert.", prefix)] = tensor
    for name in ("cls.predictions.bias", "cls.predictions.transform.dense.bias"):
        older.pop(name, None)
    save_file(older, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**OLDER_CONFIG, **changes}))


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_an_encoder_of_before_is_read(prefix: str, tmp_path: Path) -> None:
    model = random_model(NomicBertConfig(**SIZES), heads=())
    write_older_files(model, tmp_path, prefix)
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    assert again.encoder.config == model.encoder.config
    batch = PackedBatch.from_ids(random_sequences())
    assert torch.equal(again(batch), model(batch))


def test_an_encoder_of_before_comes_back_with_fewer_layers(tmp_path: Path) -> None:
    """Its older keys stay in config.json, next to the newer ones."""
    write_older_files(random_model(NomicBertConfig(**SIZES), heads=()), tmp_path, "bert.")
    smaller = keep_layers(load_model(tmp_path)[0], [0, 2])
    save_model(smaller, None, tmp_path / "smaller")
    again, _ = load_model(tmp_path / "smaller")
    batch = PackedBatch.from_ids(random_sequences())
    assert torch.equal(again(batch), smaller(batch))


def test_a_masked_lm_head_of_before_has_no_biases(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(NomicBertConfig(**SIZES))
    with torch.no_grad():
        model.get_parameter("masked_lm.dense.bias").zero_()
    write_older_files(model, tmp_path, "bert.", architectures=["NomicBertForPreTraining"])
    again, report = load_model(tmp_path)
    assert again.head_names == ("masked_lm",)
    assert not report.newly_initialised
    assert not report.unexpected
    assert "untrained" not in caplog.text
    bias = model.get_parameter("masked_lm.bias")
    batch = PackedBatch.from_ids(random_sequences())
    torch.testing.assert_close(
        again.masked_lm_logits(again(batch)), model.masked_lm_logits(model(batch)) - bias, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("qkv_proj_bias", True), ("prenorm", True), ("rotary_emb_fraction", 0.0), ("activation_function", "geglu")],
)
def test_other_models_of_the_code_are_refused(key: str, value: object, tmp_path: Path) -> None:
    write_older_files(random_model(NomicBertConfig(**SIZES), heads=()), tmp_path, "", **{key: value})
    with pytest.raises(DataError, match=key):
        load_model(tmp_path)


def test_the_paddings_row_starts_at_zero() -> None:
    model = HeadedModel(NomicBertConfig(**SIZES).build(97, pad_id=5), ("masked_lm",))
    model.initialise(0)
    assert not model.encoder.word_embedding.weight[5].any()
