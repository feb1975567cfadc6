"""Token shards: a tokenised corpus on disk, read through memory maps.

Not from a paper. The tokens of all documents are concatenated; two indices give the starts of segments (sentences or
lines) and documents. prepare.py and shard_writer.py write the shards.

Shapes: S segments, D documents, T tokens of a range, V vocabulary, F shard files.

Four segments in two documents:
    tokens             7 8 9 | 4 5 | 6 6 6 6 | 3
    segment_start_S1   0       3     5         9   10
    document_start_D1  0             2             4

Annotated spans (see bertkit.text.annotated) are marked by one byte per token, two bits per field:
    a span of field 0  . X X | . . | X . . . | .
    spans-00000.bin    0 3 2   0 0   3 0 0 0   0
"""

from __future__ import annotations

import hashlib
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertkit.arrays import Int64Array
from bertkit.errors import DataError
from bertkit.files import MAX_LISTING_BYTES, file_within, read_json, sha256_of
from bertkit.stores.store import Store
from bertkit.stores.url import StoreUrl, is_url
from bertkit.text.annotated import BEGINS, INSIDE

FORMAT = "bertkit-token-shards"
VERSION = 1
_MOST_MANIFEST_BYTES = 1 << 28
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
SEGMENTS = "segments-00000.idx"
DOCUMENTS = "documents-00000.idx"
COUNTS = "token_counts.npy"
SPAN_FIELDS = "span_fields"
SPANS = "spans"
"""Entries of the manifest: names of the fields with spans, in the order of their bits; outcomes of their spans."""
INDEX_TYPE = np.dtype("<i8")


def tokens_file(shard: int) -> str:
    """Name of a shard's file of tokens."""
    return f"tokens-{shard:05d}.bin"


def spans_file(shard: int) -> str:
    """Name of the file that marks the spans of a shard's tokens."""
    return f"spans-{shard:05d}.bin"


def token_type(vocab_size: int) -> np.dtype[Any]:
    """uint16 if the vocabulary fits, else uint32; little-endian on every machine."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def is_shards(directory: str | Path) -> bool:
    """Whether this directory, or this place on a store, contains token shards, finished or not."""
    if is_url(str(directory)):
        return are_stored(StoreUrl.parse(str(directory)))
    path = Path(directory)
    return _mentions(path / MANIFEST, FORMAT) or _mentions(path / PROGRESS, '"identity"', '"stage"')


def _mentions(path: Path, *words: str) -> bool:
    """Whether a small file contains all of these words; other tools have files with such names, too."""
    if not path.is_file() or path.stat().st_size > _MOST_MANIFEST_BYTES:
        return False
    content = path.read_bytes()
    return all(word.encode() in content for word in words)


@cache
def are_stored(url: StoreUrl) -> bool:
    """Whether this place contains a manifest of token shards; read once per process.

    Raises:
        DataError: the store cannot be read.
    """
    if url.is_pattern:
        return False
    manifest = Store(url).get_bytes(MANIFEST)
    return manifest is not None and FORMAT.encode() in manifest


class TokenShards:
    """A tokenised corpus. Picklable: a worker process opens its own memory maps.

    Attributes:
        directory: where the files are; also a tokenizer directory.
        name: the text in messages, such as the user's files; the directory if nothing else is known.
        manifest: the content of manifest.json.
        fingerprint: sha256 over the sha256 of every file; equal for equal corpora with equal tokenizers.
        vocab_size, tokens, num_segments, num_documents: counts.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any]) -> None:
        self.directory = directory
        self.name = str(directory)
        self.manifest = manifest
        self.vocab_size: int = manifest["vocab_size"]
        self.tokens: int = manifest["tokens"]
        self.num_segments: int = manifest["segments"]
        self.num_documents: int = manifest["documents"]

    @classmethod
    def open(cls, directory: str | Path, *, verify: bool = False) -> TokenShards:
        """Open finished shards. The size of every file is checked, and with `verify` also its sha256.

        Raises:
            DataError: not shards, unfinished, or a file is missing, truncated or altered; the message names it.
        """
        path = Path(directory)
        if not (path / MANIFEST).is_file():
            raise DataError(_why_not_shards(path))
        manifest = read_json(path / MANIFEST, max_bytes=MAX_LISTING_BYTES)
        if manifest.get("format") != FORMAT:
            raise DataError(f"{path / MANIFEST}: not the manifest of token shards (format {manifest.get('format')!r})")
        if manifest.get("version") != VERSION:
            raise DataError(
                f"{path}: token shards of version {manifest.get('version')!r}, expected {VERSION}; tokenise again"
            )
        if (fault := _manifest_fault(manifest)) is not None:
            raise DataError(f"{path / MANIFEST}: damaged: {fault}; {_REMEDY}")
        for name, expected in manifest["files"].items():
            _check_file(file_within(path, name, path / MANIFEST), expected, verify=verify)
        return cls(path, manifest)

    @property
    def fingerprint(self) -> str:
        hashes = sorted((name, file["sha256"]) for name, file in self.manifest["files"].items())
        return hashlib.sha256(repr(hashes).encode()).hexdigest()

    @cached_property
    def segment_start_S1(self) -> Int64Array:
        """Offset of each segment's first token over all shards; the last entry is the number of tokens."""
        return self._map(SEGMENTS, INDEX_TYPE)

    @cached_property
    def document_start_D1(self) -> Int64Array:
        """Index of each document's first segment; the last entry is the number of segments."""
        return self._map(DOCUMENTS, INDEX_TYPE)

    @cached_property
    def token_counts_V(self) -> Int64Array:
        """How often each id of the vocabulary occurs."""
        counts_V: Int64Array = np.load(self.directory / COUNTS)
        return counts_V

    def tokens_between(self, start: int, end: int) -> Int64Array:
        """Tokens start to end (exclusive), ids_T, counted over all shards; a range may span several shards.

        Raises:
            IndexError: unless 0 <= start <= end <= tokens.
        """
        if not 0 <= start <= end <= self.tokens:
            raise IndexError(f"tokens {start} to {end} of {self.tokens}")
        parts = self._between(self._shards, start, end)
        return np.concatenate(parts, dtype=np.int64) if parts else np.zeros(0, np.int64)

    def documents_of(self, token_N: Int64Array) -> Int64Array:
        """The number of the document that contains each token, (N,)."""
        segment_N = np.searchsorted(self.segment_start_S1, token_N, side="right") - 1
        return np.searchsorted(self.document_start_D1, segment_N, side="right") - 1

    def document_starts(self, start: int, end: int) -> Int64Array:
        """The first token of each document that begins at tokens start to end (exclusive); the end of the corpus counts
        as one. Unlike an index of all documents, this takes no time and memory that grow with their number."""
        low, high = np.searchsorted(self.document_start_D1, np.searchsorted(self.segment_start_S1, [start, end]))
        starts: Int64Array = self.segment_start_S1[self.document_start_D1[low:high]]
        return starts

    @property
    def span_fields(self) -> list[str]:
        """The fields with marked spans, in the order of their bits; empty without annotations."""
        return list(self.manifest.get(SPAN_FIELDS, ()))

    def span_marks_between(self, start: int, end: int) -> NDArray[np.uint8]:
        """Marks of tokens start to end (exclusive), marks_T: bit 2f where a span of field f begins, 2f + 1 inside it.

        Spans that reach beyond the range are left out. Only for shards with `span_fields`.
        """
        stop = min(end + 1, self.tokens)
        parts = self._between(self._marks, start, stop)
        marks_T = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
        next_mark = int(marks_T[end - start]) if stop > end else 0
        marks_T = marks_T[: end - start].copy()
        for field in range(len(self.span_fields)):
            begins, inside = BEGINS << 2 * field, INSIDE << 2 * field
            # A token that is inside a span but does not begin one continues the previous token's span.
            goes_on_T = marks_T & (begins | inside) == inside
            cut_in_front = int(np.argmin(goes_on_T)) if not goes_on_T.all() else marks_T.size
            marks_T[:cut_in_front] &= ~np.uint8(inside)
            if next_mark & (begins | inside) == inside and marks_T.size:
                begin_P = np.flatnonzero(marks_T & begins)
                last = int(begin_P[-1]) if begin_P.size else 0
                marks_T[last:] &= ~np.uint8(begins | inside)
        return marks_T

    def _between(self, files: list[NDArray[Any]], start: int, end: int) -> list[NDArray[Any]]:
        first, last = np.searchsorted(self._shard_start_F1, [start, end - 1], side="right") - 1
        parts = []
        for shard in range(int(first), int(last) + 1):
            offset = int(self._shard_start_F1[shard])
            parts.append(files[shard][max(start - offset, 0) : end - offset])
        return parts

    @cached_property
    def _shard_start_F1(self) -> Int64Array:
        return np.cumsum([0] + [shard["tokens"] for shard in self.manifest["shards"]], dtype=np.int64)

    @cached_property
    def _shards(self) -> list[NDArray[Any]]:
        dtype = np.dtype(self.manifest["dtype"])
        return [self._map(shard["file"], dtype) for shard in self.manifest["shards"]]

    @cached_property
    def _marks(self) -> list[NDArray[Any]]:
        return [self._map(spans_file(shard), np.dtype(np.uint8)) for shard in range(len(self.manifest["shards"]))]

    def _map(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        # As a plain array: indexing a numpy.memmap object costs several times as much.
        return np.memmap(self.directory / name, dtype=dtype, mode="r").view(np.ndarray)

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self.directory, "manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["directory"], state["manifest"])  # type: ignore[misc]  # maps are opened when first used


def _why_not_shards(path: Path) -> str:
    if not path.is_dir():
        return f"{path}: no such directory of token shards"
    if (path / PROGRESS).is_file():
        return f"{path}: unfinished token shards; run the same command again, it continues where it stopped"
    return f"{path}: not token shards ({MANIFEST} is missing); make them with `bertkit tokenize SOURCE --out DIR`"


def _manifest_fault(manifest: dict[str, Any]) -> str | None:
    """What is missing in a finished manifest, or not in the form that `ShardWriter` writes; None if it is valid."""
    for key in ("vocab_size", "tokens", "segments", "documents"):
        if not _is_count(manifest.get(key)):
            return f"{key} is {manifest.get(key)!r:.60}, expected a whole number"
    files, shards = manifest.get("files"), manifest.get("shards")
    if not isinstance(files, dict) or not all(
        isinstance(file, dict) and _is_count(file.get("bytes")) and isinstance(file.get("sha256"), str)
        for file in files.values()
    ):
        return "files must give bytes and sha256 of each file"
    if not isinstance(shards, list) or not all(
        isinstance(each, dict) and each.get("file") == tokens_file(number) and _is_count(each.get("tokens"))
        for number, each in enumerate(shards)
    ):
        return "shards must give file and tokens of each shard, in order"
    dtype = token_type(manifest["vocab_size"])
    if manifest.get("dtype") != dtype.str:
        return f"dtype is {manifest.get('dtype')!r:.60}, expected {dtype.str!r} for {manifest['vocab_size']} entries"
    sizes = {
        SEGMENTS: (manifest["segments"] + 1) * INDEX_TYPE.itemsize,
        DOCUMENTS: (manifest["documents"] + 1) * INDEX_TYPE.itemsize,
        **{each["file"]: each["tokens"] * dtype.itemsize for each in shards},
        **({spans_file(n): each["tokens"] for n, each in enumerate(shards)} if manifest.get(SPAN_FIELDS) else {}),
    }
    for name, size in sizes.items():
        if name not in files or files[name]["bytes"] != size:
            return f"{name} must be listed in files with {size:,} bytes"
    if sum(each["tokens"] for each in shards) != manifest["tokens"]:
        return f"the tokens of the shards do not add up to {manifest['tokens']:,}"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_REMEDY = "tokenise again into an empty directory"


def _check_file(path: Path, expected: dict[str, Any], *, verify: bool) -> None:
    if not path.is_file():
        raise DataError(f"{path}: missing; {_REMEDY}")
    size = path.stat().st_size
    if size != expected["bytes"]:
        change = "truncated" if size < expected["bytes"] else "altered"
        raise DataError(f"{path}: {change}: {size:,} bytes, but {expected['bytes']:,} were written; {_REMEDY}")
    if verify and sha256_of(path) != expected["sha256"]:
        raise DataError(f"{path}: altered: its sha256 is not the one in {MANIFEST}; {_REMEDY}")
