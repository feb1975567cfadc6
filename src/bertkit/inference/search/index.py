"""A directory that holds a corpus for search: texts with their ids, their vectors, and FAISS's index of these.

Own design. index.json is written last, and says which model the vectors are of: a query's vector is comparable only to
vectors of the same weights, pooling and tokenizer, so any other model is refused by its fingerprint.

    DIR/index.json      model, fingerprint, settings, kind, count, width, sha256 of the corpus
    DIR/vectors.npy     float32, length one; vectors.json once all are there
    DIR/vectors.faiss   of ivf and hnsw
    DIR/texts.jsonl     id and text, one line each; texts.npy has where each begins
    DIR/bm25.npz        with bm25.json, from the first hybrid search on
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bertkit.errors import DataError, UsageError
from bertkit.files import read_json, sha256_of, write_json
from bertkit.inference.embed import InputText, embed_to_file
from bertkit.inference.embed_settings import EmbedSettings
from bertkit.inference.embedder import Embedder
from bertkit.inference.search import vectors
from bertkit.inference.search.bm25 import Bm25
from bertkit.inference.search.settings import IndexSettings
from bertkit.inference.vector_types import Floats, finished
from bertkit.progress import Progress, silent_progress

log = logging.getLogger(__name__)

DESCRIPTION = "index.json"
_VECTORS, _EMBEDDED, _FAISS = "vectors.npy", "vectors.json", "vectors.faiss"
_TEXTS, _STARTS = "texts.jsonl", "texts.npy"
_FORMAT = 1


@dataclass(frozen=True, eq=False)
class TextIndex:
    """An index that is built.

    Attributes:
        directory: where it is.
        described: the content of index.json.
    """

    directory: Path
    described: dict[str, Any]

    @classmethod
    def open(cls, directory: Path) -> TextIndex:
        """Open an index.

        Raises:
            DataError: there is none, it is unfinished, or of another version.
        """
        if not (directory / DESCRIPTION).is_file():
            there = "holds an unfinished index" if (directory / _TEXTS).exists() else "holds no index"
            raise DataError(f"{directory}: {there}; build it with --corpus FILE --index {directory}")
        described = read_json(directory / DESCRIPTION)
        keys = {"format", "model", "fingerprint", "settings", "kind", "count", "width"}
        if not keys <= set(described) or described["format"] != _FORMAT:
            raise DataError(f"{directory / DESCRIPTION}: is no index of this version; build it anew")
        return cls(directory, described)

    @property
    def count(self) -> int:
        return int(self.described["count"])

    @property
    def settings(self) -> IndexSettings:
        return IndexSettings.model_validate(self.described["settings"])

    @cached_property
    def vectors(self) -> Floats:
        """(N, E), a memory map."""
        found: Floats = np.load(self.directory / _VECTORS, mmap_mode="r")
        if found.shape != (self.count, self.described["width"]):
            raise DataError(f"{self.directory / _VECTORS}: has shape {found.shape}; build the index anew")
        return found

    @cached_property
    def faiss(self) -> Any:
        """FAISS's index."""
        if self.described["kind"] == "exact":
            return vectors.build(self.vectors, "exact")
        return vectors.read(self.directory / _FAISS, count=self.count, width=int(self.described["width"]))

    @cached_property
    def bm25(self) -> Bm25:
        """The words of the texts, counted once and kept."""
        if not (self.directory / "bm25.json").is_file():
            log.info("counting the words of %s texts", f"{self.count:,}")
            Bm25.of(text for _, text in self.texts()).save(self.directory)
        return Bm25.load(self.directory)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Ids and texts in their order."""
        with (self.directory / _TEXTS).open("rb") as file:
            for line in file:
                row = json.loads(line)
                yield row["id"], row["text"]

    @cached_property
    def _starts(self) -> Any:
        return np.load(self.directory / _STARTS, mmap_mode="r")

    def at(self, numbers: Sequence[int]) -> list[tuple[str, str]]:
        """Ids and texts of these rows."""
        found = []
        with (self.directory / _TEXTS).open("rb") as file:
            for number in numbers:
                file.seek(int(self._starts[number]))
                row = json.loads(file.readline())
                found.append((row["id"], row["text"]))
        return found

    def check_model(self, embedder: Embedder) -> None:
        """Refuse a model whose vectors are not comparable.

        Raises:
            DataError: another model, or other settings of its vectors.
        """
        if embedder.fingerprint != self.described["fingerprint"]:
            raise DataError(
                f"{self.directory}: was built with {self.described['model']} (fingerprint"
                f" {self.described['fingerprint'][:12]}), and {embedder.name} is another model"
                f" ({embedder.fingerprint[:12]}): their vectors cannot be compared; search with that model, or build"
                " the index anew"
            )

    def query_vectors(self, embedder: Embedder, texts: Sequence[str]) -> Floats:
        """The vectors of queries, as those of the texts are."""
        return finished(embedder.encode(texts, long=self.settings.long), embed_settings(self.settings))


def embed_settings(settings: IndexSettings) -> EmbedSettings:
    """How the vectors of an index are made."""
    return EmbedSettings(truncate=settings.truncate, long=settings.long, max_length=settings.max_length, normalise=True)


def build_index(
    directory: Path,
    corpus: Path,
    texts: Iterator[InputText],
    embedder: Embedder,
    settings: IndexSettings,
    *,
    read_as: Mapping[str, Any] = MappingProxyType({}),
    progress: Progress = silent_progress,
) -> TextIndex:
    """Build an index of a file, or open it where it is built; what was embedded before a stop is not repeated.

    Args:
        directory: of the index.
        corpus: the file.
        texts: what is in it.
        embedder: the model.
        settings: of the index.
        read_as: how the texts are read of the file, such as the column.
        progress: the display.

    Raises:
        UsageError: the directory holds another index, or other files.
        DataError: a faulty text, or none.
        StoppedError: a signal came; the same command goes on.
    """
    vectors.faiss()
    source = sha256_of(corpus)
    deciding = {
        "format": _FORMAT,
        "fingerprint": embedder.fingerprint,
        "precision": embedder.precision,
        "settings": settings.model_dump(mode="json"),
        "corpus": source,
        "reading": dict(read_as),
    }
    if (directory / DESCRIPTION).is_file():
        index = TextIndex.open(directory)
        differing = [key for key, value in deciding.items() if index.described.get(key) != value]
        if differing:
            raise UsageError(
                f"--index {directory}: holds an index with another {' and '.join(differing)}; name a new directory, or"
                " delete it"
            )
        log.info("%s is built already", directory)
        return index
    if directory.is_dir() and not _is_ours(directory):
        raise UsageError(f"--index {directory}: holds other files; name a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    counts = _embedded(directory, deciding)
    if counts is None:
        described = {"path": str(corpus.resolve()), "sha256": source}
        written = embed_to_file(
            embedder,
            _kept(texts, directory),
            directory / _VECTORS,
            embed_settings(settings),
            source=described,
            progress=progress,
        )
        if not written.count:
            raise DataError(f"{corpus}: has no texts")
        counts = {"count": written.count, "width": written.width, "cut": written.cut}
        write_json(directory / _EMBEDDED, {**deciding, **counts})
    kind = vectors.kind_for(settings.kind, counts["count"])
    if kind != "exact":
        made = vectors.build(np.load(directory / _VECTORS, mmap_mode="r"), kind, progress=progress)
        vectors.write(made, directory / _FAISS)
    local = Path(embedder.name).expanduser()
    name = str(local.absolute()) if local.exists() else embedder.name
    write_json(directory / DESCRIPTION, {**deciding, **counts, "model": name, "kind": kind})
    return TextIndex.open(directory)


def _embedded(directory: Path, deciding: Mapping[str, Any]) -> dict[str, Any] | None:
    """The counts of vectors that are all there while their index is not; None where some are missing."""
    if not ((directory / _EMBEDDED).is_file() and (directory / _VECTORS).is_file()):
        return None
    found = read_json(directory / _EMBEDDED)
    if any(found.get(key) != value for key, value in deciding.items()):
        return None
    return {key: found[key] for key in ("count", "width", "cut")}


def _is_ours(directory: Path) -> bool:
    return all(each.name.startswith(("vectors.", "texts.", "bm25.")) for each in directory.iterdir())


def _kept(texts: Iterator[InputText], directory: Path) -> Iterator[InputText]:
    """The texts, each written beside the vectors on the way."""
    starts = []
    with (directory / _TEXTS).open("wb") as file:
        for text in texts:
            starts.append(file.tell())
            file.write(json.dumps({"id": text.id, "text": text.text}).encode() + b"\n")
            yield text
    np.save(directory / _STARTS, np.array(starts, dtype=np.int64))
