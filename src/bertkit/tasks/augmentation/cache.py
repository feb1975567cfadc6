"""Augmented examples on disk: created once, found again by their inputs, and continued after an interruption.

Not from a paper. As with token shards (data/prepare.py), a directory of the cache is named by the sha256 of examples,
settings, seed, and the content of all files read. Blocks of examples are written one by one, each atomically, and
merged into one file at the end. Two processes with the same work write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bertkit.errors import DataError
from bertkit.files import read_json, sha256_of, write_json, write_text
from bertkit.json_input import parse_json
from bertkit.progress import Progress, silent_progress
from bertkit.tasks.augmentation.base import Augmentation, AugmentationContext, Augmenter, settings_of
from bertkit.tasks.examples import MaskedText, TextExample

log = logging.getLogger(__name__)

VERSION = 1
BLOCK_EXAMPLES = 1000
EXAMPLES_FILE = "examples.jsonl"
MANIFEST_FILE = "manifest.json"


def augmented_examples(
    examples: Sequence[TextExample],
    augmentation: Augmentation,
    *,
    cache: Path,
    surroundings: AugmentationContext | None = None,
    progress: Progress | None = None,
    block_examples: int = BLOCK_EXAMPLES,
) -> list[TextExample]:
    """The result of `Augmentation.with_copies`, from the cache if it is there.

    Args:
        examples: in any order; a copy's content depends only on its own example (and, with word classes derived from
            the texts, on the set of examples).
        augmentation: the method.
        cache: the cache's root; the files are in `augmented/` below it.
        surroundings: seed, device, network.
        progress: shows how many examples are done.
        block_examples: how many are created before they are written; determines memory and the loss if killed.

    Raises:
        DataError: a file or a model is invalid, or the cached file is damaged and cannot be removed.
    """
    surroundings = surroundings or AugmentationContext()
    identity = augmented_identity(examples, augmentation, surroundings)
    directory = cache / "augmented" / identity[:32]
    path = directory / EXAMPLES_FILE
    if _is_whole(directory):
        log.info("augmented examples found in %s", directory)
        return list(_read(path))
    directory.mkdir(parents=True, exist_ok=True)
    blocks = [
        range(first, min(first + block_examples, len(examples))) for first in range(0, len(examples), block_examples)
    ]
    files = [directory / f"block-{block.start:09d}-{block.stop:09d}.jsonl" for block in blocks]
    augmenter: Augmenter | None = None
    with (progress or silent_progress)("augmenting", total=len(examples), unit="examples") as meter:
        for block, file in zip(blocks, files, strict=True):
            if not file.is_file():
                augmenter = augmenter or augmentation.augmenter(examples, surroundings)
                own = examples[block.start : block.stop]
                write_text(file, "".join(_lines(augmentation.with_copies(own, augmenter.variants(own)))))
            meter.update(block.stop)
    try:
        write_text(path, "".join(file.read_text(encoding="utf-8") for file in files))
    except FileNotFoundError:
        # Another process did the same work and has already merged the blocks.
        if not _is_whole(directory):
            raise
        _remove_blocks(directory)
        return list(_read(path))
    found = list(_read(path))
    write_json(
        directory / MANIFEST_FILE,
        {
            "version": VERSION,
            "identity": identity,
            "method": augmentation.model_dump(mode="json"),
            "seed": surroundings.seed,
            "examples": len(examples),
            "with_copies": len(found),
            "sha256": sha256_of(path),
        },
    )
    _remove_blocks(directory)
    log.info(
        "augmented: %s examples, with their copies %s, %.1f MB in %s",
        *(f"{len(examples):,}", f"{len(found):,}", path.stat().st_size / 1e6, directory),
    )
    return found


def augmented_identity(
    examples: Sequence[TextExample], augmentation: Augmentation, surroundings: AugmentationContext
) -> str:
    """sha256 (hex) of everything that determines the result."""
    digest = hashlib.sha256()
    record = {
        "version": VERSION,
        "settings": settings_of(augmentation, augmentation.reads(offline=surroundings.offline)),
        "seed": surroundings.seed,
    }
    digest.update(json.dumps(record, sort_keys=True).encode())
    for line in _lines(examples):
        digest.update(line.encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def _is_whole(directory: Path) -> bool:
    """Whether the result is complete and undamaged; a damaged one is discarded."""
    manifest, path = directory / MANIFEST_FILE, directory / EXAMPLES_FILE
    if not manifest.is_file():
        return False
    if path.is_file() and read_json(manifest).get("sha256") == sha256_of(path):
        return True
    log.warning("%s: has changed since it was written; the augmented examples are created again", path)
    manifest.unlink(missing_ok=True)
    return False


def _remove_blocks(directory: Path) -> None:
    for file in directory.glob("block-*.jsonl"):
        file.unlink(missing_ok=True)


def _lines(examples: Iterable[TextExample]) -> Iterator[str]:
    for example in examples:
        row = {
            "id": example.id,
            "text": _shown(example.text),
            "text_pair": None if example.text_pair is None else _shown(example.text_pair),
            "label": example.label,
        }
        yield json.dumps(row, ensure_ascii=False) + "\n"


def _shown(text: str) -> str | list[str]:
    """A text with masks as the list of its parts."""
    return list(text.parts) if isinstance(text, MaskedText) else text


def _read(path: Path) -> Iterator[TextExample]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row: dict[str, Any] = parse_json(line, f"{path}, line {number}")
                texts = {name: _text(row[name]) for name in ("text", "text_pair")}
                label = tuple(row["label"]) if isinstance(row["label"], list) else row["label"]
                assert texts["text"] is not None
                yield TextExample(row["id"], texts["text"], texts["text_pair"], label)
            except (DataError, ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}, line {number}: not an augmented example ({error}); remove the file"
                ) from error


def _text(value: str | list[str] | None) -> str | None:
    return MaskedText(value) if isinstance(value, list) else value
