"""Writes the files that make a model directory a sentence embedder: modules.json and the files it refers to.

Formats of `sentence-transformers`, with keys that its versions 2 to 6 read. Sibling sentence.py reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertkit.files import write_json
from bertkit.models.files.model_files import CONFIG_FILE, MODULES_FILE, SAFETENSORS, write_safetensors
from bertkit.models.sentence import OLD_POOLING_KEYS, SIZE_KEYS, AnyPooling, Dense
from bertkit.models.similarity import Similarity
from bertkit.models.splade import ENCODERS, MODULE_TYPES, POOLING, VERSION_KEYS, is_sparse, pooling_json
from bertkit.models.text_reading import SETTINGS_FILE, VERSION_FILE, TextReading

_OLDEST = "2.2.2"
"""The oldest version that uses these keys; readers interpret them by it."""
PACKAGE = "sentence_transformers.models"


def write_sentence_files(
    directory: Path,
    *,
    width: int,
    pooling: Sequence[AnyPooling],
    normalise: bool,
    max_tokens: int,
    reading: TextReading | None = None,
    similarity: Similarity = "cosine",
    kept: int | None = None,
    maps: Sequence[Dense] = (),
) -> None:
    """Write the files next to an encoder's.

    Args:
        directory: the encoder's directory; the encoder is the first module.
        width: width of the encoder's states; for sparse vectors, the size of the vocabulary.
        pooling: pooling modes, whose vectors are concatenated.
        normalise: whether vectors are scaled to length one.
        max_tokens: texts are truncated to this length.
        reading: prompts and lower-casing; None: neither.
        similarity: how dense vectors are compared.
        kept: the first numbers of dense vectors, or the greatest weights of sparse ones, that are kept; None: all.
        maps: the modules between the pooling and the scaling.
    """
    reading = reading or TextReading()
    sparse = is_sparse(pooling)
    modes = {key: mode in pooling for key, mode in OLD_POOLING_KEYS.items()}
    how = {"word_embedding_dimension": width, **modes, "include_prompt": True}
    encoder = MODULE_TYPES[ENCODERS[0]] if sparse else f"{PACKAGE}.Transformer"
    pool = (MODULE_TYPES[POOLING], pooling_json(pooling[0], width)) if sparse else (f"{PACKAGE}.Pooling", how)
    write_json(directory / SETTINGS_FILE, {"max_seq_length": max_tokens, "do_lower_case": reading.lowercases})
    version = version_settings(reading, similarity) | (VERSION_KEYS if sparse else {})
    limit = {} if kept is None else {SIZE_KEYS[sparse]: kept}
    write_json(directory / VERSION_FILE, version | limit)
    dense = [(f"{PACKAGE}.Dense", each.settings()) for each in maps]
    after = [pool, *dense, *([(f"{PACKAGE}.Normalize", None)] if normalise else [])]
    for path, each in zip(write_modules(directory, encoder, after)[1:], maps, strict=False):
        state = {name: tensor.detach().float().cpu().contiguous() for name, tensor in each.state_dict().items()}
        write_safetensors(path / SAFETENSORS, state)


def version_settings(reading: TextReading, similarity: Similarity = "cosine") -> dict[str, Any]:
    """The contents of the file with the version, the prompts and the similarity."""
    prompts = {"prompts": dict(reading.prompts), "default_prompt_name": reading.default}
    return {"__version__": {"sentence_transformers": _OLDEST}, **prompts, "similarity_fn_name": similarity}


def write_modules(directory: Path, encoder: str, others: Sequence[tuple[str, Mapping[str, Any] | None]]) -> list[Path]:
    """Write modules.json, and a directory with its config.json for each module after the encoder; their directories.

    Args:
        directory: the encoder's.
        encoder: its type.
        others: type and settings of the other modules; None: a module without a config.json.
    """
    paths = ["", *(f"{number}_{kind.rpartition('.')[2]}" for number, (kind, _) in enumerate(others, start=1))]
    for path, (_, settings) in zip(paths[1:], others, strict=True):
        (directory / path).mkdir(exist_ok=True)
        if settings is not None:
            write_json(directory / path / CONFIG_FILE, settings)
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": kind}
        for number, (path, kind) in enumerate(zip(paths, [encoder, *(kind for kind, _ in others)], strict=True))
    ]
    write_json(directory / MODULES_FILE, entries)
    return [directory / path for path in paths[1:]]
