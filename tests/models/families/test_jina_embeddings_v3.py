"""Files of jinaai/xlm-roberta-flash-implementation: jina-embeddings-v3, with updates for its tasks, and
jina-reranker-v2, which is an XLM-R. Everything else is in test_families.py."""

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
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.jina_embeddings_v3 import JinaEmbeddingsV3Config
from bertkit.models.families.roberta import XLMRobertaConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel

CODE = "jinaai/xlm-roberta-flash-implementation--"
PUBLISHED = {
    "model_type": "xlm-roberta",
    "auto_map": {"AutoConfig": f"{CODE}configuration_xlm_roberta.XLMRobertaFlashConfig"},
    "hidden_size": 42,
    "num_hidden_layers": 3,
    "num_attention_heads": 7,
    "intermediate_size": 51,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 97,
    "use_flash_attn": True,
}
V3 = {
    "architectures": ["XLMRobertaModel"],
    "max_position_embeddings": 37,
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "lora_adaptations": ["retrieval.query", "text-matching"],
    "lora_alpha": 1,
    "lora_rank": 4,
}
RERANKER = {
    "architectures": ["XLMRobertaForSequenceClassification"],
    "max_position_embeddings": 39,
    "position_embedding_type": "absolute",
}
NEWER = {  # the layer's modules in the newer form of each family, by their names in the flash implementation
    "jina_embeddings_v3": {
        "mixer.Wqkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "mixer.out_proj": ["self_attn.o_proj"],
        "norm1": ["post_attention_layernorm"],
        "mlp.fc1": ["mlp.fc1"],
        "mlp.fc2": ["mlp.fc2"],
        "norm2": ["post_mlp_layernorm"],
    },
    "xlm-roberta": {
        "mixer.Wqkv": ["attention.self.query", "attention.self.key", "attention.self.value"],
        "mixer.out_proj": ["attention.output.dense"],
        "norm1": ["attention.output.LayerNorm"],
        "mlp.fc1": ["intermediate.dense"],
        "mlp.fc2": ["output.dense"],
        "norm2": ["output.LayerNorm"],
    },
}


def in_flash_form(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    stem = "roberta.layers" if family == "jina_embeddings_v3" else "roberta.encoder.layer"
    found = {}
    for layer in range(3):
        for module, newer in NEWER[family].items():
            for leaf in ("weight", "bias"):
                parts = [tensors.pop(f"{stem}.{layer}.{name}.{leaf}") for name in newer]
                found[f"roberta.encoder.layers.{layer}.{module}.{leaf}"] = torch.cat(parts)
    for name, tensor in tensors.items():
        found[name.replace("embeddings.LayerNorm", "emb_ln")] = tensor
    return found


def with_updates(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every matrix as torch's parametrisation stores it, beside the updates of two tasks."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            found[name] = tensor
            continue
        stem = f"{name.removesuffix('.weight')}.parametrizations.weight"
        found[f"{stem}.original"] = tensor
        rows, columns = tensor.shape
        found[f"{stem}.0.lora_A"] = torch.ones(2, 4, columns)
        found[f"{stem}.0.lora_B"] = torch.ones(2, rows, 4)
    return found


def write_published(model: HeadedModel, directory: Path, tensors: dict[str, Tensor], contents: dict[str, Any]) -> None:
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(PUBLISHED | contents))


@pytest.mark.parametrize(
    ("config", "heads", "contents"),
    [
        pytest.param(JinaEmbeddingsV3Config(**SIZES), ("pooler",), V3, id="jina-embeddings-v3"),
        pytest.param(
            XLMRobertaConfig(**{**SIZES, "max_position_embeddings": 39}),
            ("sequence_classification",),
            RERANKER,
            id="jina-reranker-v2",
        ),
    ],
)
def test_a_published_checkpoint_is_read_and_written_in_the_newer_form(
    config: EncoderConfig,
    heads: tuple[str, ...],
    contents: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = random_model(config, heads=heads)
    save_model(model, None, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    flash = in_flash_form(dict(tensors), config.model_type)
    is_v3 = isinstance(config, JinaEmbeddingsV3Config)
    write_published(model, tmp_path, with_updates(flash) if is_v3 else flash, contents)
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    assert again.heads == model.heads
    assert again.encoder.config.model_type == config.model_type
    assert again.encoder.config == config
    batch = PackedBatch.from_ids(random_sequences())
    assert torch.equal(again(batch), model(batch))
    assert ("updates of the model's tasks" in caplog.text) == is_v3
    save_model(again, None, tmp_path / "newer")
    newer = json.loads((tmp_path / "newer" / "config.json").read_text())
    # Its code would find none of the newer names.
    assert "auto_map" not in newer
    assert newer["model_type"] == config.model_type
    written = load_file(tmp_path / "newer" / "model.safetensors")
    assert set(written) == set(tensors)
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
