"""Qwen3, Llama and Gemma 3: older forms of config.json, what is refused, windows, and initial weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.oracle import all_cases, make_inputs, make_oracle

from bertkit.errors import DataError
from bertkit.models.families.gemma3_text import Gemma3TextConfig, OneCentredNorm
from bertkit.models.families.qwen3 import Qwen3Config
from bertkit.models.files.hub import load_model, read_config
from bertkit.models.headed import HeadedModel

transformers = pytest.importorskip("transformers")

CASES = {case.name: case for case in all_cases()}
QWEN3_EMBEDDING = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151_643,
    "eos_token_id": 151_643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 32_768,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151_669,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100_000,
    "tie_word_embeddings": True,
    "vocab_size": 49_152,
}
EMBEDDING_GEMMA = {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3TextModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "dtype": "float32",
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "max_position_embeddings": 2048,
    "model_type": "gemma3_text",
    "num_attention_heads": 3,
    "num_hidden_layers": 24,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": None,
    "rope_theta": 1_000_000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
    "use_cache": True,
    "vocab_size": 262_144,
}


def config_of(directory: Path, contents: dict[str, Any], **changed: Any) -> Any:
    (directory / "config.json").write_text(json.dumps({**contents, **changed}))
    return read_config(directory)[0]


@pytest.mark.parametrize("published", [QWEN3_EMBEDDING, SMOLLM2, EMBEDDING_GEMMA], ids=lambda each: each["model_type"])
def test_published_settings_are_those_that_transformers_reads(published: dict[str, Any], tmp_path: Path) -> None:
    own = config_of(tmp_path, published)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    written = {**own.to_hub(), "vocab_size": published["vocab_size"]}
    rewritten = transformers.AutoConfig.for_model(published["model_type"], **written)
    for key, value in theirs.to_dict().items():
        if key in own.to_hub() or key in ("layer_types", "sliding_window"):
            assert rewritten.to_dict()[key] == value, key
    assert config_of(tmp_path, theirs.to_dict(), architectures=published["architectures"]).to_hub() == own.to_hub()


def test_a_window_of_embedding_gemma_is_half_on_either_side(tmp_path: Path) -> None:
    own = config_of(tmp_path, EMBEDDING_GEMMA)
    assert own.each_side == 256  # |distance| < 257, the original's window of 512 // 2 + 1
    assert own.kinds.count("full_attention") == 4
    assert own.kinds[5] == "full_attention"
    causal = config_of(tmp_path, EMBEDDING_GEMMA, use_bidirectional_attention=False, sliding_window_pattern=2)
    assert causal.each_side == 511
    assert causal.kinds[:2] == ("sliding_attention", "full_attention")
    assert "causal_lm" in causal.heads()
    assert "causal_lm" not in own.heads()


@pytest.mark.parametrize(
    ("published", "key", "value"),
    [
        (QWEN3_EMBEDDING, "use_sliding_window", True),
        (QWEN3_EMBEDDING, "use_bidirectional_attention", True),
        (QWEN3_EMBEDDING, "is_causal", False),
        (QWEN3_EMBEDDING, "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        (QWEN3_EMBEDDING, "layer_types", ["sliding_attention"]),
        (SMOLLM2, "rope_scaling", {"rope_type": "llama3", "factor": 32.0}),
        (EMBEDDING_GEMMA, "rope_scaling", {"rope_type": "linear", "factor": 8.0}),
        (EMBEDDING_GEMMA, "final_logit_softcapping", 30.0),
        (EMBEDDING_GEMMA, "attn_logit_softcapping", 50.0),
    ],
)
def test_what_would_be_another_model_is_refused(
    published: dict[str, Any], key: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=key):
        config_of(tmp_path, published, **{key: value})


def test_weights_without_the_prefix_of_the_named_class_are_read(tmp_path: Path) -> None:
    """Qwen3-Embedding's files are those of a bare decoder, but name the language model, whose words are tied."""
    case = CASES["qwen3"]
    oracle = make_oracle(case, "Qwen3ForCausalLM")
    oracle.model.save_pretrained(tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    config_of(tmp_path, contents, architectures=["Qwen3ForCausalLM"])
    model, report = load_model(tmp_path)
    assert model.head_names == ("causal_lm",)
    assert not report.missing
    assert not report.unexpected
    inputs = make_inputs(case, model)
    logits = model.logits("causal_lm", model(inputs.batch), inputs.batch)
    torch.testing.assert_close(logits, oracle(**inputs.padded).logits[inputs.real_BS], rtol=1e-5, atol=1e-5)


def test_norms_begin_as_the_identity() -> None:
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 7}
    gemma = HeadedModel(Gemma3TextConfig(**sizes).build(11), ())
    gemma.initialise(seed=1)
    norms = [part for part in gemma.modules() if isinstance(part, OneCentredNorm)]
    assert len(norms) == 7
    assert not any(part.weight.any() for part in norms)
    qwen = HeadedModel(Qwen3Config(**sizes).build(11), ())
    qwen.initialise(seed=1)
    assert all(bool((part.weight == 1).all()) for part in qwen.modules() if isinstance(part, torch.nn.RMSNorm))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_dim": 7}, "must be even"),
        ({"hidden_size": 18}, "must be a multiple of num_attention_heads"),
        ({"num_key_value_heads": 5}, "must be a multiple of num_key_value_heads"),
    ],
)
def test_heads_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Qwen3Config(**{"hidden_size": 16, "num_attention_heads": 4, **settings})
    assert Qwen3Config(hidden_size=18, num_attention_heads=4, head_dim=6).head_width == 6
