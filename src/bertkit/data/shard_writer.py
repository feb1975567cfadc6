"""Writing token shards as they fill, in constant memory; an interrupted run continues.

Not from a paper. A shard is closed at the end of the block that fills it; only then is progress.json updated. Anything
written beyond that point before a crash is cut off and written again. Sibling shards.py reads finished shards.

Shapes: K segments of a block, T tokens of a block, V vocabulary, F fields with spans, C outcomes of a span.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bertkit.arrays import BoolArray, Int64Array, save_array
from bertkit.data.shards import (
    COUNTS,
    DOCUMENTS,
    FORMAT,
    INDEX_TYPE,
    MANIFEST,
    PROGRESS,
    SEGMENTS,
    SPAN_FIELDS,
    SPANS,
    VERSION,
    TokenShards,
    spans_file,
    token_type,
    tokens_file,
)
from bertkit.errors import DataError
from bertkit.files import fsync_path, open_to_write, read_json, sha256_of, write_json
from bertkit.text.annotated import OUTCOMES

SHARD_TOKENS = 1 << 26
_STATE = ("tokens", "segments", "documents", "shards", "spans", "position")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpanMarks:
    """Annotated spans of a block.

    Attributes:
        marks_T: of each token, two bits per field, see bertkit.text.annotated.
        outcomes_FC: the number of spans by field and outcome.
    """

    marks_T: NDArray[np.uint8]
    outcomes_FC: Int64Array


@dataclass(frozen=True)
class TokenBlock:
    """A tokenised block of the corpus; no segment is empty.

    Attributes:
        ids_T: tokens of all segments end to end, in the shards' type.
        length_K: tokens of each segment.
        begins_K: whether the segment begins a document.
        opens: whether the block ends in a document that began in it and has no segment yet.
        spans: None without annotations.
    """

    ids_T: NDArray[Any]
    length_K: Int64Array
    begins_K: BoolArray
    opens: bool
    spans: SpanMarks | None = None


class ShardWriter:
    """Writes one directory of shards, from its start or from the last shard that an interrupted run finished.

    Args:
        directory: of the shards.
        identity: of the corpus and everything that determines the tokens.
        vocab_size: V.
        shard_tokens: a shard is closed when it has this many tokens.
        span_fields: names of the fields whose spans are marked, in a file next to each shard.

    Attributes:
        position: the argument of `append` for the last block of the last finished shard; None at the start. Append the
            blocks after it.
    """

    def __init__(
        self,
        directory: Path,
        identity: str,
        vocab_size: int,
        *,
        shard_tokens: int = SHARD_TOKENS,
        span_fields: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.identity = identity
        self.vocab_size = vocab_size
        self.shard_tokens = shard_tokens
        self.dtype = token_type(vocab_size)
        self.position: Any = None
        self._latest: Any = None
        self.shards: list[dict[str, Any]] = []
        self.tokens = self.segments = self.documents = 0
        self.span_fields = tuple(span_fields)
        self.spans = [[0] * len(OUTCOMES) for _ in self.span_fields]
        self._opens = True
        self._counts_V = np.zeros(vocab_size, np.int64)
        directory.mkdir(parents=True, exist_ok=True)
        self._restore()
        self._segments = self._opened(SEGMENTS, self.segments)
        self._documents = self._opened(DOCUMENTS, self.documents)
        self._shard: BinaryIO | None = None
        self._marks: BinaryIO | None = None
        self._shard_size = 0

    def append(self, block: TokenBlock, position: Any) -> None:
        """Add a block; `position` (JSON) is where reading continues after it."""
        if len(block.length_K):
            begins_K = block.begins_K.copy()
            begins_K[0] |= self._opens
            starts_K = self.tokens + np.cumsum(block.length_K) - block.length_K
            self._segments.write(starts_K.astype(INDEX_TYPE).tobytes())
            first_segments = self.segments + np.flatnonzero(begins_K)
            self._documents.write(first_segments.astype(INDEX_TYPE).tobytes())
            self._append_tokens(block)
            self.segments += len(starts_K)
            self.documents += len(first_segments)
            self._opens = block.opens
        else:
            self._opens |= block.opens
        if block.spans is not None:
            self.spans = (np.array(self.spans) + block.spans.outcomes_FC).tolist()
        self._latest = position
        if self._shard_size >= self.shard_tokens:
            self._close_shard()

    def finish(self, description: dict[str, Any], tokenizer_files: list[str]) -> TokenShards:
        """Close the last shard and write the manifest, which completes the directory.

        Args:
            description: further entries of the manifest, such as source and options.
            tokenizer_files: files of the tokenizer in this directory.

        Raises:
            DataError: there are no tokens.
        """
        if not self.tokens:
            raise DataError("the corpus is empty: it has no text")
        if self._shard_size:
            self._close_shard()
        for index, total in ((self._segments, self.tokens), (self._documents, self.segments)):
            index.write(np.array([total], INDEX_TYPE).tobytes())
            _close(index)
        with open_to_write(self.directory / COUNTS) as file:
            save_array(file, self._counts_V)
            _sync(file)
        hashes = {shard["file"]: shard["sha256"] for shard in self.shards}
        marks = [spans_file(number) for number in range(len(self.shards))] if self.span_fields else []
        names = sorted([*hashes, *marks, SEGMENTS, DOCUMENTS, COUNTS, *tokenizer_files])
        files = {
            name: {
                "bytes": (self.directory / name).stat().st_size,
                "sha256": hashes.get(name) or sha256_of(self.directory / name),
            }
            for name in names
        }
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "identity": self.identity,
            "tokens": self.tokens,
            "segments": self.segments,
            "documents": self.documents,
            "vocab_size": self.vocab_size,
            "dtype": self.dtype.str,
            **description,
            **self._span_description(),
            "shards": [{"file": shard["file"], "tokens": shard["tokens"]} for shard in self.shards],
            "files": files,
        }
        write_json(self.directory / MANIFEST, manifest)
        (self.directory / PROGRESS).unlink(missing_ok=True)
        return TokenShards.open(self.directory)

    def _span_description(self) -> dict[str, Any]:
        if not self.span_fields:
            return {}
        outcomes = {
            field: dict(zip(OUTCOMES, numbers, strict=True))
            for field, numbers in zip(self.span_fields, self.spans, strict=True)
        }
        return {SPAN_FIELDS: list(self.span_fields), SPANS: outcomes}

    def close(self) -> None:
        """Close the open files; the next run rewrites what is not in a finished shard."""
        for file in (self._segments, self._documents, self._shard, self._marks):
            if file is not None:
                file.close()

    def _append_tokens(self, block: TokenBlock) -> None:
        ids_T = block.ids_T
        if self._shard is None:
            self._shard = open_to_write(self.directory / tokens_file(len(self.shards)))
            self._hash = hashlib.sha256()
            self._marks = open_to_write(self.directory / spans_file(len(self.shards))) if self.span_fields else None
        if self._marks is not None:
            assert block.spans is not None, "every block of a corpus with span fields has marks"
            self._marks.write(block.spans.marks_T.tobytes())
        content = np.ascontiguousarray(ids_T, self.dtype).tobytes()
        self._shard.write(content)
        self._hash.update(content)
        self._shard_size += len(ids_T)
        self.tokens += len(ids_T)
        self._counts_V += np.bincount(ids_T, minlength=self.vocab_size)

    def _close_shard(self) -> None:
        assert self._shard is not None
        _close(self._shard)
        if self._marks is not None:
            _close(self._marks)
        _sync(self._segments)
        _sync(self._documents)
        name = tokens_file(len(self.shards))
        self.shards.append({"file": name, "tokens": self._shard_size, "sha256": self._hash.hexdigest()})
        self._shard, self._marks, self._shard_size, self.position = None, None, 0, self._latest
        fsync_path(self.directory)
        self._record_progress()

    def _record_progress(self) -> None:
        state = {name: getattr(self, name) for name in ("identity", *_STATE)}
        write_json(self.directory / PROGRESS, {**state, "opens": self._opens, "stage": "tokens"})

    def _restore(self) -> None:
        """Restore the state of the last finished shard, if there is one of the same corpus and tokenizer."""
        path = self.directory / PROGRESS
        state = read_json(path) if path.is_file() else {}
        if state.get("identity") != self.identity or not state.get("shards") or self._missing(state):
            self._record_progress()
            return
        for name in _STATE:
            setattr(self, name, state.get(name, getattr(self, name)))
        self._opens = state["opens"]
        for shard in self.shards:
            ids_T = np.fromfile(self.directory / shard["file"], self.dtype)
            self._counts_V += np.bincount(ids_T, minlength=self.vocab_size)
        log.info("continuing after %s shards (%s tokens) of an interrupted run", len(self.shards), f"{self.tokens:,}")

    def _missing(self, state: dict[str, Any]) -> bool:
        """Whether a file of an interrupted run is incomplete; then everything is written again."""
        expected = {shard["file"]: shard["tokens"] * self.dtype.itemsize for shard in state["shards"]}
        if self.span_fields:
            expected |= {spans_file(number): shard["tokens"] for number, shard in enumerate(state["shards"])}
        expected |= {SEGMENTS: state["segments"] * 8, DOCUMENTS: state["documents"] * 8}
        sizes = {name: os.path.getsize(p) if (p := self.directory / name).is_file() else -1 for name in expected}
        short = [name for name, size in expected.items() if sizes[name] < size]
        if short:
            log.warning("%s: %s truncated since the interruption; starting over", self.directory, ", ".join(short))
        return bool(short)

    def _opened(self, name: str, entries: int) -> BinaryIO:
        """The index file, truncated to the entries that belong to finished shards."""
        file = open_to_write(self.directory / name, "ab")
        file.truncate(entries * INDEX_TYPE.itemsize)
        file.seek(0, os.SEEK_END)
        return file


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _close(file: BinaryIO) -> None:
    _sync(file)
    file.close()
