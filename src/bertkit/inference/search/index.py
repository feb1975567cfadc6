"""A directory with a corpus for search: texts with their ids, their vectors, and the vectors' FAISS index.

Not from a paper. index.json is written last and records the model of the vectors. A query's vector is comparable only
to vectors of the same weights, config.json, pooling and tokenizer, so any other model is refused by its fingerprint.

    DIR/index.json      model, fingerprint, settings, kind, count, width, sha256 of the corpus
    DIR/vectors.npy     float32, of unit length if the similarity is the cosine; vectors.json once all are written
    DIR/vectors.faiss   for ivf and hnsw
    DIR/vectors.npz     in place of both, for sparse vectors (SPLADE): scipy's form of a sparse matrix
    DIR/vectors.npy     of tokens (ColBERT): a row for each token, float32 or int8; vectors.starts.npy has the first row
                        of each text, vectors.cells.npz the cells of ivf
    DIR/texts.jsonl     id, text and short fields, one line each; texts.npy has the start of each line
    DIR/bm25.npz        with bm25.json, from the first hybrid search onwards
"""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic import ValidationError

from bertkit.arrays import Int64Array, save_array
from bertkit.errors import DataError, UsageError
from bertkit.files import is_unfinished, names_in, open_to_write, read_json, replacing, sha256_of, write_json
from bertkit.inference.embed import AnyEmbedder, InputText, KnownVectors, embed_to_file
from bertkit.inference.embedder import Embedder
from bertkit.inference.search import tokens, vectors
from bertkit.inference.search.bm25 import Bm25
from bertkit.inference.search.settings import IndexSettings, embed_settings
from bertkit.inference.search.sparse import SparseIndex, check_sparse_index, read_sparse
from bertkit.inference.search.tokens import TokenCells, TokenIndex
from bertkit.inference.search.update import IndexedVectors, only_the_corpus_changed, recover, replacing_directory
from bertkit.inference.token_embedder import TokenEmbedder
from bertkit.inference.token_vectors import TokenVectors, check_token_settings
from bertkit.inference.vector_types import finished
from bertkit.models.text_reading import TextReading
from bertkit.progress import Progress, silent_progress

log = logging.getLogger(__name__)

DESCRIPTION = "index.json"
_VECTORS, _EMBEDDED, _FAISS = "vectors.npy", "vectors.json", "vectors.faiss"
_TEXTS, _STARTS = "texts.jsonl", "texts.npy"
_SPARSE, _SPARSE_KIND = "vectors.npz", "sparse"
_CELLS = "vectors.cells.npz"
_FORMAT = 1
_ANEW = "delete the directory and build the index again"


@dataclass(frozen=True, eq=False)
class TextIndex:
    """A finished index.

    Attributes:
        directory: path of the index.
        described: the content of index.json.
    """

    directory: Path
    described: dict[str, Any]

    @classmethod
    def open(cls, directory: Path) -> TextIndex:
        """Open an index.

        Raises:
            DataError: there is no index, or it is unfinished or of another version.
        """
        if not (directory / DESCRIPTION).is_file():
            there = "contains an unfinished index" if (directory / _TEXTS).exists() else "contains no index"
            raise DataError(f"{directory}: {there}; build it with --corpus FILE --index {directory}")
        described = read_json(directory / DESCRIPTION)
        if not _is_description(described):
            raise DataError(f"{directory / DESCRIPTION}: is not an index of this version; build the index again")
        return cls(directory, described)

    @property
    def count(self) -> int:
        return int(self.described["count"])

    @property
    def is_sparse(self) -> bool:
        """Whether its vectors have weights of words (SPLADE)."""
        return bool(self.described["kind"] == _SPARSE_KIND)

    @property
    def is_by_token(self) -> bool:
        """Whether it has a vector for each token (ColBERT)."""
        return "tokens" in self.described

    @property
    def similarity(self) -> str:
        """How its vectors are compared: cosine, dot or maxsim."""
        earlier = "dot" if self.is_sparse else "maxsim" if self.is_by_token else "cosine"
        return str(self.described.get("similarity", earlier))

    @property
    def settings(self) -> IndexSettings:
        return IndexSettings.model_validate(self.described["settings"])

    @cached_property
    def vectors(self) -> Any:
        """(N, E), a memory map; sparse ones are a scipy matrix, (N, V), those of tokens `TokenVectors`."""
        width = int(self.described["width"])
        if self.is_sparse:
            return read_sparse(self.directory / _SPARSE, count=self.count, width=width)
        if self.is_by_token:
            return TokenVectors.read(self.directory / _VECTORS, count=self.count, width=width)
        return self._array(_VECTORS, (self.count, width))

    def _array(self, name: str, shape: tuple[int, ...]) -> Any:
        """A memory map of a file.

        Raises:
            DataError: it is damaged.
        """
        path = self.directory / name
        try:
            found = np.load(path, mmap_mode="r")
        except (EOFError, ValueError) as error:
            raise DataError(f"{path}: is damaged ({error}); {_ANEW}") from error
        if found.shape != shape:
            raise DataError(f"{path}: has shape {found.shape}, expected {shape}; {_ANEW}")
        return found

    @cached_property
    def faiss(self) -> Any:
        """FAISS's index, a `SparseIndex` or a `TokenIndex`."""
        width = int(self.described["width"])
        if self.is_sparse:
            return SparseIndex(self.vectors)
        if self.is_by_token:
            has_cells = self.described["kind"] == "ivf"
            return TokenIndex(self.vectors, TokenCells.read(self.directory / _CELLS) if has_cells else None)
        if self.described["kind"] == "exact":
            return vectors.build(self.vectors, "exact")
        return vectors.read(self.directory / _FAISS, count=self.count, width=width)

    @cached_property
    def bm25(self) -> Bm25:
        """The BM25 weights of the texts, computed once and stored, unless the directory cannot be written."""
        if (stored := Bm25.load(self.directory)) is not None:
            return stored
        log.info("counting the words of %s texts", f"{self.count:,}")
        weights = Bm25.of(text for _, text in self.texts())
        try:
            weights.save(self.directory)
        except OSError as error:
            log.warning("the weights of words could not be stored and are counted in each search: %s", error)
        return weights

    def texts(self) -> Iterator[tuple[str, str]]:
        """Ids and texts in order."""
        with (self.directory / _TEXTS).open("rb") as file:
            yield from (self._row(line)[:2] for line in file)

    def _row(self, line: bytes) -> tuple[str, str, dict[str, str]]:
        try:
            row = json.loads(line)
            return row["id"], row["text"], {"id": row["id"], **row.get("fields", {})}
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{self.directory / _TEXTS}: is damaged; {_ANEW}") from error

    @cached_property
    def _starts(self) -> Any:
        return self._array(_STARTS, (self.count,))

    def at(self, numbers: Sequence[int]) -> list[tuple[str, str]]:
        """Ids and texts of these rows."""
        return list(self.in_turn(numbers))

    def in_turn(self, numbers: Sequence[int]) -> Iterator[tuple[str, str]]:
        """Id and text of each of these rows, read when it is reached."""
        with (self.directory / _TEXTS).open("rb") as file:
            for number in numbers:
                file.seek(int(self._starts[number]))
                yield self._row(file.readline())[:2]

    @cached_property
    def _parts(self) -> dict[tuple[str, ...], tuple[Int64Array, Any]]:
        return {}

    def part(self, where: tuple[str, ...]) -> tuple[Int64Array, Any]:
        """The numbers of the texts that have all these fields with these values, each FIELD=VALUE, and an index of them
        like `faiss`, which compares all of them and numbers them from 0. The last one is kept.

        Raises:
            UsageError: one has no `=`, or no text has the field.
            DataError: an index of an earlier version.
        """
        if where in self._parts:
            return self._parts[where]
        if "fields" not in self.described:
            raise DataError(f"{self.directory}: was built by a version that kept ids and texts only; {_ANEW}")
        known = ["id", *self.described["fields"]]
        wanted = [tuple(each.split("=", 1)) for each in where]
        for given, pair in zip(where, wanted, strict=True):
            if len(pair) != 2:
                raise UsageError(f"--where {given}: expected FIELD=VALUE")
            if pair[0] not in known:
                raise UsageError(f"--where {given}: no text has a field {pair[0]!r}; there are: {', '.join(known)}")
        with (self.directory / _TEXTS).open("rb") as file:
            fields = (self._row(line)[2] for line in file)
            rows = np.array([n for n, own in enumerate(fields) if all(own.get(k) == v for k, v in wanted)], np.int64)
        self._parts.clear()
        self._parts[where] = rows, self._part(rows)
        return self._parts[where]

    def _part(self, rows: Int64Array) -> Any:
        if self.is_by_token:
            return TokenIndex(self.vectors, None, rows)
        return SparseIndex(self.vectors[rows]) if self.is_sparse else vectors.build(self.vectors[rows], "exact")

    def check_model(self, embedder: AnyEmbedder) -> None:
        """Refuse a model whose vectors are not comparable.

        Raises:
            DataError: a different model, or different settings of its vectors.
        """
        if not embedder.has_fingerprint(self.described["fingerprint"]):
            raise DataError(
                f"{self.directory}: was built with {self.described['model']} (fingerprint"
                f" {self.described['fingerprint'][:12]}), and {embedder.name} is a different model"
                f" ({embedder.fingerprint[:12]}): their vectors cannot be compared; search with the first model, or"
                " build the index again"
            )

    def query_vectors(self, embedder: AnyEmbedder, texts: Sequence[str]) -> Any:
        """The vectors of queries, computed like those of the texts, apart from the prompt."""
        if isinstance(embedder, TokenEmbedder):
            return embedder.queries(texts, self.settings.query_prompt)
        return self._vectors_of(embedder, texts, self.settings.query_prompt)

    def text_vectors(self, embedder: AnyEmbedder, texts: Sequence[str]) -> Any:
        """The vectors of other texts, computed like those of the corpus."""
        if isinstance(embedder, TokenEmbedder):
            return embedder.documents(texts, self.settings.document_prompt)
        return self._vectors_of(embedder, texts, self.settings.document_prompt)

    def _vectors_of(self, embedder: Embedder, texts: Sequence[str], prompt: str | None) -> Any:
        settings = self.settings
        if embedder.is_sparse:
            return embedder.sparse_vectors([first for (first,) in embedder.parts(texts, settings.long, prompt)])
        encoded = embedder.encode(texts, long=settings.long, prompt=prompt)
        return finished(encoded, embed_settings(settings, self.similarity))


def _is_description(described: Mapping[str, Any]) -> bool:
    """Whether an index.json has this version's keys and settings."""
    texts, numbers = ("model", "fingerprint", "kind"), ("format", "count", "width")
    try:
        IndexSettings.model_validate(described.get("settings"))
    except ValidationError:
        return False
    return (
        all(isinstance(described.get(key), str) for key in texts)
        and all(type(described.get(key)) is int for key in numbers)
        and described["format"] == _FORMAT
    )


def _with_prompts(settings: IndexSettings, reading: TextReading) -> IndexSettings:
    """The settings with the model's own prompts where none is given; None stays where that is its default prompt, as in
    an index of an earlier version."""
    own = {"query_prompt": reading.query_prompt, "document_prompt": reading.document_prompt}
    update = {name: text for name, text in own.items() if text != reading.default_prompt}
    return settings.model_copy(update={name: update[name] for name in update if getattr(settings, name) is None})


def build_index(
    directory: Path,
    corpus: Path,
    texts: Iterator[InputText],
    embedder: AnyEmbedder,
    settings: IndexSettings,
    *,
    read_as: Mapping[str, Any] = MappingProxyType({}),
    update: bool = False,
    progress: Progress = silent_progress,
) -> TextIndex:
    """Build the index of a file, or open it if it is already built; vectors from an interrupted run are kept.

    Args:
        directory: path of the index.
        corpus: the file.
        texts: contents of the file.
        embedder: the model.
        settings: of the index.
        read_as: how texts are read from the file, such as the column.
        update: whether an index of another corpus is brought up to date; texts that it contains are not embedded again.
        progress: the display.

    Raises:
        UsageError: the directory contains a different index, or other files.
        DataError: a text is faulty, or there are no texts.
        StoppedError: a signal arrived; the same command continues.
    """
    if embedder.is_sparse:
        check_sparse_index(settings)
    else:
        vectors.faiss()
    if isinstance(embedder, TokenEmbedder):
        check_token_settings(embed_settings(settings))
        tokens.kind_for(settings.kind, 0)  # refuses some, before anything is computed
    if settings.dtype == "int8" and not (isinstance(embedder, TokenEmbedder) and embedder.normalises):
        raise UsageError(
            f"--dtype int8: for vectors of tokens (ColBERT) of unit length, and those of {embedder.name} are not; leave"
            " it out"
        )
    recover(directory)
    settings = _with_prompts(settings, embedder.reading)
    deciding = {
        "format": _FORMAT,
        "fingerprint": embedder.fingerprint,
        "precision": embedder.precision,
        "similarity": embedder.similarity,
        "settings": settings.model_dump(mode="json"),
        "corpus": sha256_of(corpus),
        "reading": dict(read_as),
    }
    if not (directory / DESCRIPTION).is_file():
        return _build(directory, corpus, texts, deciding, embedder, settings, progress=progress)
    present = TextIndex.open(directory)
    differing = _differing(present.described, deciding, embedder)
    if not differing:
        log.info("%s is built already", directory)
        return present
    if not (update and only_the_corpus_changed(differing)):
        remedy = "name a new directory, or delete this one"
        if only_the_corpus_changed(differing):
            remedy = f"give --update to embed only the texts that it does not contain, or {remedy}"
        raise UsageError(f"--index {directory}: contains an index that differs in: {', '.join(differing)}; {remedy}")
    known = IndexedVectors((text for _, text in present.texts()), lambda row: present.at([row])[0][1], present.vectors)
    with replacing_directory(directory) as new:
        _build(new, corpus, texts, deciding, embedder, settings, known=known, progress=progress)
    log.info("%s vectors were taken from the index that was there", f"{known.found:,}")
    return TextIndex.open(directory)


def _build(
    directory: Path,
    corpus: Path,
    texts: Iterator[InputText],
    deciding: Mapping[str, Any],
    embedder: AnyEmbedder,
    settings: IndexSettings,
    *,
    known: KnownVectors | None = None,
    progress: Progress,
) -> TextIndex:
    """Build an index, or continue it.

    Args:
        directory: path of the index.
        corpus: the file.
        texts: contents of the file.
        deciding: the entries of index.json that determine the vectors.
        embedder: the model.
        settings: of the index.
        known: vectors that need not be computed.
        progress: the display.
    """
    if directory.is_dir() and not _is_ours(directory):
        raise UsageError(f"--index {directory}: contains other files; name a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    counts = _embedded(directory, deciding, embedder)
    if counts is None:
        described = {"path": str(corpus.resolve()), "sha256": deciding["corpus"], "blank_texts": False}
        fields = set[str]()
        with closing(_kept(texts, directory, fields)) as kept:  # or a full disk would be reported once it is collected
            written = embed_to_file(
                embedder,
                kept,
                directory / (_SPARSE if embedder.is_sparse else _VECTORS),
                embed_settings(settings, embedder.similarity),
                source=described,
                known=known,
                progress=progress,
            )
        if not written.count:
            raise DataError(f"{corpus}: contains no texts")
        counts = {"count": written.count, "width": written.width, "cut": written.cut, "fields": sorted(fields)}
        if isinstance(embedder, TokenEmbedder):
            counts["tokens"] = written.entries
        write_json(directory / _EMBEDDED, {**deciding, **counts})
    kind = _indexed(directory, counts, embedder, settings, progress)
    for path in directory.iterdir():
        if is_unfinished(path.name):  # a kill left it
            path.unlink()
    local = Path(embedder.name).expanduser()
    name = str(local.absolute()) if local.exists() else embedder.name
    write_json(directory / DESCRIPTION, {**deciding, **counts, "model": name, "kind": kind})
    return TextIndex.open(directory)


def _indexed(
    directory: Path, counts: Mapping[str, Any], embedder: AnyEmbedder, settings: IndexSettings, progress: Progress
) -> str:
    """Write what makes the search of the vectors faster, and return the kind of index."""
    if embedder.is_sparse:
        return _SPARSE_KIND
    if isinstance(embedder, TokenEmbedder):
        kind = tokens.kind_for(settings.kind, counts["tokens"])
        if kind == "ivf":
            found = TokenVectors.read(directory / _VECTORS, count=counts["count"], width=counts["width"])
            TokenCells.of(found, progress=progress).save(directory / _CELLS)
        return kind
    kind = vectors.kind_for(settings.kind, counts["count"])
    if kind in ("ivf", "hnsw"):
        vectors.write(
            vectors.build(np.load(directory / _VECTORS, mmap_mode="r"), kind, progress=progress), directory / _FAISS
        )
    return kind


def _differing(recorded: Mapping[str, Any], deciding: Mapping[str, Any], embedder: AnyEmbedder) -> list[str]:
    """The names of what differs from a recorded index; one of an earlier version compares dense vectors by the
    cosine."""
    earlier = embedder.similarity if embedder.is_sparse or embedder.is_by_token else "cosine"
    recorded = {"similarity": earlier, **recorded}
    if embedder.has_fingerprint(recorded.get("fingerprint")):
        recorded = {**recorded, "fingerprint": deciding["fingerprint"]}
    return [key for key, value in deciding.items() if recorded.get(key) != value]


def _embedded(directory: Path, deciding: Mapping[str, Any], embedder: AnyEmbedder) -> dict[str, Any] | None:
    """The counts if all vectors are written but their index is not; None if some are missing."""
    there = directory / (_SPARSE if embedder.is_sparse else _VECTORS)
    if not ((directory / _EMBEDDED).is_file() and there.is_file()):
        return None
    found = read_json(directory / _EMBEDDED)
    if _differing(found, deciding, embedder):
        return None
    return {key: value for key, value in found.items() if key not in deciding}


def _is_ours(directory: Path) -> bool:
    """Whether the files are those of an index, perhaps unfinished ones that a kill left (`unfinished_name`)."""
    names = (name.removeprefix(".") for name in names_in(directory))
    return all(name.startswith(("vectors.", "texts.", "bm25.", DESCRIPTION)) for name in names)


def _kept(texts: Iterator[InputText], directory: Path, fields: set[str]) -> Generator[InputText, None, None]:
    """The texts that are not blank, each also written next to the vectors; adds the names of their fields."""
    starts = []
    with open_to_write(directory / _TEXTS) as file:
        for text in (each for each in texts if each.text.strip()):
            starts.append(file.tell())
            row = {"id": text.id, "text": text.text, **({"fields": dict(text.fields)} if text.fields else {})}
            file.write(json.dumps(row).encode() + b"\n")
            fields.update(text.fields)
            yield text
    with replacing(directory / _STARTS) as file:
        save_array(file, np.array(starts, dtype=np.int64))
