"""Finding a model by its name: a directory, a run directory, or a Hub id with or without a revision.

Protocol and cache of `huggingface_hub`: files that are cached are not fetched again, a fetch that was cut off goes on,
and HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN keep their usual meaning.
"""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from bertkit.errors import DataError
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
    return _fetched(name, revision or named_revision or None, offline=offline or _hub_is_offline())


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
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"{shown}: not a directory here, and not in the local Hub cache while the Hub cannot be reached;"
            " go online once, or give a model directory with --model"
        ) from error
    except GatedRepoError as error:
        raise DataError(
            f"{shown}: the Hub gives this model only to those who accepted its terms; accept them on its page and set"
            " HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise DataError(f"{shown}: the Hub's model has no branch, tag or commit of this name") from error
    except RepositoryNotFoundError as error:
        raise DataError(
            f"{shown}: neither a model directory nor a model of the Hub; check the name, and set HF_TOKEN if the model"
            " is private"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{shown}: cannot be fetched from the Hub: {reason}; run again to go on") from error
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


def _hub_is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
