"""Finding a model by its name: a directory, a run directory, or a Hub id with or without a revision.

How the Hub is asked, and what it means where it refuses, is in bertkit/hub.py.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download

from bertkit.errors import DataError
from bertkit.hub import hub_faults, is_offline, refusal
from bertkit.models.weight_files import PICKLE

CONFIG_FILE = "config.json"
MODULES_FILE = "modules.json"
"""Of a sentence-transformers directory, whose encoder may lie in a directory of its own."""
_SMALL_FILES = ["*.json", "*.txt", "*.model"]
_SAFE_WEIGHTS = ["*.safetensors"]
_PICKLED_WEIGHTS = [PICKLE, f"*/{PICKLE}", "pytorch_model-*.bin"]
# Other frameworks' copies of the same weights.
_NOT_WANTED = ["onnx/*", "openvino/*", "coreml/*", "checkpoint-*/*", "runs/*"]


def find_model(model: str, *, revision: str | None = None, offline: bool = False) -> Path:
    """The directory of a model.

    Args:
        model: a model directory, a run directory, or a Hub id, which may name a revision: `ORG/NAME@main`.
        revision: a branch, tag or commit of the Hub's; goes before the one that `model` names.
        offline: take what the local cache has and ask nobody.

    Raises:
        DataError: if there is no such directory and the Hub has no such model, or cannot be asked.
    """
    path = Path(model).expanduser()
    for directory in (path, path / "model"):
        if is_model(directory):
            return directory
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise DataError(f"{model}: no model here (neither {CONFIG_FILE} nor model/{CONFIG_FILE})")
    name, _, named_revision = model.partition("@")
    return _fetched(name, revision or named_revision or None, offline=is_offline(offline))


def is_model(directory: Path) -> bool:
    """Whether a directory holds a model: an encoder's, or a sentence encoder's whose parts have their own
    directories."""
    return (directory / CONFIG_FILE).is_file() or (directory / MODULES_FILE).is_file()


def encoder_directory(directory: Path) -> Path:
    """Where config.json, weights and tokenizer lie: old sentence encoders have them in 0_Transformer."""
    inner = directory / "0_Transformer"
    return inner if not (directory / CONFIG_FILE).is_file() and (inner / CONFIG_FILE).is_file() else directory


def _fetched(name: str, revision: str | None, *, offline: bool) -> Path:
    shown = f"{name}@{revision}" if revision else name
    try:
        directory = _snapshot(name, revision, [*_SMALL_FILES, *_SAFE_WEIGHTS], offline=offline)
        if not any(directory.rglob("*.safetensors")):
            directory = _snapshot(name, revision, [*_SMALL_FILES, *_PICKLED_WEIGHTS], offline=offline)
    except hub_faults() as fault:
        raise DataError(f"{shown}: no directory of this name, and {refusal(fault, 'model')}") from fault
    if not is_model(directory):
        raise DataError(f"{shown}: the Hub's model has no {CONFIG_FILE}")
    return directory


def _snapshot(name: str, revision: str | None, patterns: list[str], *, offline: bool) -> Path:
    return Path(
        snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_NOT_WANTED,
            local_files_only=offline,
        )
    )
