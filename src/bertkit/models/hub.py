"""Model directories in the Hugging Face format: `AutoModelForPreTraining.from_pretrained` loads what is written here.

File formats of `transformers` and `safetensors`; neither class of theirs is needed. A model is named by a directory,
a run directory, or a Hub id.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bertkit.errors import DataError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.pretraining import PretrainingModel
from bertkit.models.registry import FAMILIES
from bertkit.models.weights import WeightReport, load_weights, prefixed, to_hub_names
from bertkit.text.tokenizer import Tokenizer

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_HUB_PATTERNS = ["*.json", "*.txt", "*.safetensors", "*.model"]
_ARCHITECTURES = {
    ("bert", ("masked_lm", "next_sentence")): "BertForPreTraining",
    ("bert", ("masked_lm",)): "BertForMaskedLM",
    ("bert", ("next_sentence",)): "BertForNextSentencePrediction",
    ("megatron-bert", ("masked_lm", "next_sentence")): "MegatronBertForPreTraining",
    ("megatron-bert", ("masked_lm",)): "MegatronBertForMaskedLM",
    ("megatron-bert", ("next_sentence",)): "MegatronBertForNextSentencePrediction",
}


def hub_names(model: PretrainingModel) -> dict[str, str]:
    """The Hub's name of each of the model's modules."""
    prefix = model.encoder.config.hub_prefix
    return {
        **prefixed(model.encoder.hub_names, "encoder.", f"{prefix}."),
        "pooler.dense": f"{prefix}.pooler.dense",
        **model.hub_names,
    }


def config_json(model: PretrainingModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of config.json."""
    config = model.encoder.config
    return {
        "architectures": [_ARCHITECTURES[config.model_type, model.head_names]],
        "model_type": config.model_type,
        **config.model_dump(mode="json", exclude={"family"}),
        "vocab_size": model.encoder.vocab_size,
        "pad_token_id": tokenizer.pad_id,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def save_model(model: PretrainingModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files. Equal weights give equal bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_json(model, tokenizer), indent=2, sort_keys=True)
    (directory / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    state = model.state_dict()
    names = to_hub_names(state, hub_names(model))
    tensors = {names[name]: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    tokenizer.save(directory)


def find_model(model: str, *, offline: bool = False) -> Path:
    """The directory of a model that is named by a directory, a run directory or a Hub id.

    Raises:
        DataError: if there is no such directory and the Hub has no such model, or cannot be asked.
    """
    path = Path(model).expanduser()
    for directory in (path, path / "model"):
        if (directory / CONFIG_FILE).is_file():
            return directory
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise DataError(f"{model}: no model here (neither {CONFIG_FILE} nor model/{CONFIG_FILE})")
    try:
        return Path(
            snapshot_download(model, allow_patterns=_HUB_PATTERNS, local_files_only=offline or _hub_is_offline())
        )
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"{model}: not a directory here, and not in the local Hub cache while the Hub cannot be reached;"
            " go online once, or give a model directory with --model"
        ) from error
    except (RepositoryNotFoundError, HfHubHTTPError, OSError) as error:
        raise DataError(f"{model}: neither a model directory nor a model that the Hub gives: {error}") from error


def _hub_is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def read_config(directory: Path) -> tuple[EncoderConfig, dict[str, Any]]:
    """The family's settings and the whole of config.json.

    Raises:
        DataError: if the file is damaged, its model type unknown or a setting faulty.
    """
    path = directory / CONFIG_FILE
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from error
    kind = FAMILIES.get(contents.get("model_type"))
    if kind is None:
        raise DataError(
            f"{path}: model_type is {contents.get('model_type')!r}; known are {', '.join(sorted(FAMILIES))}"
        )
    known = {name: contents[name] for name in kind.model_fields if name in contents and name != "family"}
    try:
        # A config.json that does not say its activation means the exact GELU, the default of the Hub's classes.
        return kind.model_validate({"hidden_act": "gelu", **known}, strict=False), contents
    except ValidationError as error:
        raise DataError(f"{path}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error


def load_pretraining_model(
    directory: Path, *, heads: tuple[str, ...] | None = None
) -> tuple[PretrainingModel, WeightReport]:
    """A model with its pretraining heads.

    Args:
        directory: as found by `find_model`.
        heads: which heads to build; the ones that the checkpoint has where None. A head that it lacks is drawn anew and
            its weights are in the report's `missing`.

    Raises:
        DataError: if a file is damaged, a weight of the encoder is missing, or a shape disagrees.
    """
    config, contents = read_config(directory)
    path = directory / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read as safetensors: {error}") from error
    if heads is None:
        heads = _heads_in(tensors)
    model = PretrainingModel(config.build(int(contents["vocab_size"])), heads)
    model.initialise(seed=0)
    with torch.no_grad():
        report = load_weights(model, tensors, hub_names(model), source=str(path))
    backbone = [name for name in report.missing if name.startswith(config.hub_prefix + ".") and ".pooler." not in name]
    if backbone:
        raise DataError(f"{path}: the encoder lacks {len(backbone)} weights, such as {', '.join(backbone[:3])}")
    return model, report


def _heads_in(tensors: dict[str, torch.Tensor]) -> tuple[str, ...]:
    prefixes = {"masked_lm": "cls.predictions.", "next_sentence": "cls.seq_relationship."}
    return tuple(head for head, prefix in prefixes.items() if any(name.startswith(prefix) for name in tensors))
