"""Writes the files that make a model directory a sentence embedder: modules.json and the files it refers to.

Formats of `sentence-transformers`, with keys that its versions 2 to 6 read. Sibling sentence.py reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertkit.files import write_json
from bertkit.models.files.model_files import CONFIG_FILE, MODULES_FILE
from bertkit.models.sentence import OLD_POOLING_KEYS, SETTINGS_FILE, VERSION_FILE, AnyPooling, TextReading
from bertkit.models.splade import ENCODERS, MODULE_TYPES, POOLING, VERSION_KEYS, is_sparse, pooling_json

_OLDEST = "2.2.2"
"""The oldest version that uses these keys; readers interpret them by it."""
_PACKAGE = "sentence_transformers.models"


def write_sentence_files(
    directory: Path,
    *,
    width: int,
    pooling: Sequence[AnyPooling],
    normalise: bool,
    max_tokens: int,
    reading: TextReading | None = None,
) -> None:
    """Write the files next to an encoder's.

    Args:
        directory: the encoder's directory; the encoder is the first module.
        width: width of the encoder's states; for sparse vectors, the size of the vocabulary.
        pooling: pooling modes, whose vectors are concatenated.
        normalise: whether vectors are scaled to length one.
        max_tokens: texts are truncated to this length.
        reading: prompts and lower-casing; None: neither.
    """
    reading = reading or TextReading()
    sparse = is_sparse(pooling)
    kinds = [ENCODERS[0], POOLING] if sparse else ["Transformer", "Pooling"]
    kinds += ["Normalize"] if normalise else []
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], start=1))]
    for path in paths[1:]:
        (directory / path).mkdir(exist_ok=True)
    modes = {key: mode in pooling for key, mode in OLD_POOLING_KEYS.items()}
    how = {"word_embedding_dimension": width, **modes, "include_prompt": True}
    write_json(directory / paths[1] / CONFIG_FILE, pooling_json(pooling[0], width) if sparse else how)
    write_json(directory / SETTINGS_FILE, {"max_seq_length": max_tokens, "do_lower_case": reading.lowercases})
    prompts = {"prompts": dict(reading.prompts), "default_prompt_name": reading.default}
    write_json(directory / VERSION_FILE, version_settings() | prompts | (VERSION_KEYS if sparse else {}))
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": MODULE_TYPES.get(kind, f"{_PACKAGE}.{kind}")}
        for number, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write_json(directory / MODULES_FILE, entries)


def version_settings() -> dict[str, Any]:
    """The contents of the file with the version."""
    settings: dict[str, Any] = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    return {"__version__": {"sentence_transformers": _OLDEST}, **settings}
