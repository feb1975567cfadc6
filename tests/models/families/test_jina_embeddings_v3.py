"""Files of jinaai/xlm-roberta-flash-implementation: jina-embeddings-v3, with updates for its tasks, and
jina-reranker-v2, which is an XLM-R. Everything else is in test_families.py."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.from_equations import SIZES, random_model, random_sequences
from tests.tasks.tiny_task import tiny_tokenizer
from torch import Tensor

import bertkit
from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.jina_embeddings_v3 import JinaEmbeddingsV3Config
from bertkit.models.families.roberta import XLMRobertaConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.files.model_files import find_model
from bertkit.models.headed import HeadedModel
from bertkit.models.sentence_files import write_sentence_files
from bertkit.models.text_reading import TextReading
from bertkit.text.tokenizer_files import save_tokenizer

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
    found, generator = {}, torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            found[name] = tensor
            continue
        stem = f"{name.removesuffix('.weight')}.parametrizations.weight"
        found[f"{stem}.original"] = tensor
        rows, columns = tensor.shape
        shapes = ((rows, 4), (4, columns)) if "embeddings" in name else ((4, columns), (rows, 4))
        for part, shape in zip("AB", shapes, strict=True):
            found[f"{stem}.0.lora_{part}"] = torch.randn(2, *shape, generator=generator)
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


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, HeadedModel, dict[str, Tensor]]:
    """jina-embeddings-v3 with its prompts, the model without updates, and the file's tensors."""
    monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "v3"
    tokenizer = tiny_tokenizer()
    config = JinaEmbeddingsV3Config(**SIZES)
    model = random_model(config, tokenizer.vocab_size, heads=("pooler",))
    write_sentence_files(
        directory_of(model, directory), width=42, pooling=("mean",), normalise=True, max_tokens=37, reading=PROMPTS
    )
    save_tokenizer(tokenizer, directory)
    tensors = with_updates(in_flash_form(load_file(directory / "model.safetensors"), config.model_type))
    write_published(model, directory, tensors, V3 | {"vocab_size": tokenizer.vocab_size})
    return directory, model, tensors


PROMPTS = TextReading({"retrieval.query": "the list of "})


def directory_of(model: HeadedModel, directory: Path) -> Path:
    save_model(model, None, directory)
    return directory


def test_a_task_after_the_models_name_adds_its_updates(
    published: tuple[Path, HeadedModel, dict[str, Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    directory, plain, tensors = published
    for number, task in enumerate(V3["lora_adaptations"]):
        expected = copy.deepcopy(plain)
        for name, parameter in expected.named_parameters():
            older = FLASH_NAMES.sub(lambda found: FLASH[found[0]], name.removeprefix("encoder."))
            rows = [at for at, part in enumerate(("query", "key", "value")) if f".{part}." in name]
            stem = f"roberta.{older.removesuffix('.weight')}.parametrizations.weight."
            if f"{stem}original" not in tensors:
                continue
            first, second = (tensors[f"{stem}0.lora_{part}"][number] for part in "AB")
            update = first @ second if "embeddings" in stem else second @ first
            parameter.data += (update.chunk(3)[rows[0]] if rows else update) / 4
        found = find_model(f"{directory}/{task}")
        assert find_model(f"{directory}/{task}") == found
        model, report = load_model(found)
        assert not report.unexpected
        batch = PackedBatch.from_ids(random_sequences())
        assert not torch.equal(model(batch), plain(batch))
        torch.testing.assert_close(model(batch), expected(batch), rtol=1e-5, atol=1e-5)
    assert "updates of the model's tasks" not in caplog.text


FLASH = {
    "word.": "embeddings.word_embeddings.",
    "token_type.": "embeddings.token_type_embeddings.",
    "layers.": "encoder.layers.",
    **{f"attention.{part}.": "mixer.Wqkv." for part in ("query", "key", "value")},
    "attention.output.": "mixer.out_proj.",
    "feed_forward.inner.": "mlp.fc1.",
    "feed_forward.outer.": "mlp.fc2.",
}
FLASH_NAMES = re.compile("|".join(map(re.escape, FLASH)))


def test_a_task_has_its_prompt_as_the_default(published: tuple[Path, HeadedModel, dict[str, Tensor]]) -> None:
    directory, _, _ = published
    query, matching = (bertkit.load(f"{directory}/{task}") for task in V3["lora_adaptations"])
    np.testing.assert_array_equal(query.encode(["cat"]), query.encode(["cat"], prompt="the list of "))
    assert not np.array_equal(query.encode(["cat"]), query.encode(["cat"], prompt=""))
    np.testing.assert_array_equal(matching.encode(["cat"]), matching.encode(["cat"], prompt=""))


def test_a_task_without_updates_is_refused(published: tuple[Path, HeadedModel, dict[str, Tensor]]) -> None:
    directory, _, _ = published
    with pytest.raises(DataError, match=r"no updates for the task separation; it has retrieval\.query, text-matching"):
        find_model(f"{directory}/separation")
    with pytest.raises(DataError, match="does not exist"):
        find_model(f"{directory.parent}/other/separation")
