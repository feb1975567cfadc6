"""`bertkit embed`: the vectors of a file of texts, dense or sparse, in blocks, for files of any size.

Not from a paper; embedder.py computes, vector_files.py and sparse_vectors.py write. A block is tokenised once and
sorted by length. A vector does not depend on the texts it is computed with, so block boundaries and interruptions do
not change a bit.

Shapes: N texts of a block, F numbers stored per vector.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import issparse, vstack

from bertkit.errors import DataError, StoppedError
from bertkit.inference.embed_settings import EmbedSettings
from bertkit.inference.embedder import Embedder, TooLongError
from bertkit.inference.part_files import writing_alone
from bertkit.inference.predict_input import InputColumns, id_of, string_of
from bertkit.inference.sparse_vectors import SparseVectorFile, check_sparse_settings, words_of_vocabulary
from bertkit.inference.token_embedder import TokenEmbedder
from bertkit.inference.token_vectors import TokenVectorFile, check_token_settings
from bertkit.inference.vector_files import VectorFile
from bertkit.inference.vector_types import STORED, check_width, finished, stored, stored_width
from bertkit.jobs.job import Job
from bertkit.jobs.registry import executor_of
from bertkit.jobs.settings import ExecutorSettings
from bertkit.progress import Progress, silent_progress
from bertkit.training.interrupt import StopRequest

log = logging.getLogger(__name__)

_BLOCKS_AHEAD = 2
"""Per worker: one block is computed while another waits."""
FIRST_BLOCK, LARGEST_BLOCK = 256, 2048
"""Texts per block: few at first, so that lines come soon, then more, so that batches are full."""
_LONGEST_FIELD = 200
"""In characters; longer ones are texts themselves."""
_LARGEST_CHARACTERS = 1 << 22
"""Maximum number of characters per block, for any number of texts: 4 million bound the memory."""


@dataclass(frozen=True)
class InputText:
    """A text with its id and its position in the input.

    Attributes:
        fields: the short ones of its row besides id and text, as texts: years, names, languages.
    """

    id: str
    text: str
    place: str
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EmbeddedBlock:
    """The vectors of some texts.

    Attributes:
        texts: in input order.
        stored_NF: their vectors as they are stored; sparse ones are a scipy matrix, (N, V), those of tokens a list.
        cut: number of texts whose end was not read.
        windowed: number of texts read in several windows.
        without_tokens: number of texts without tokens; their vectors are zeros.
    """

    texts: list[InputText]
    stored_NF: Any
    cut: int
    windowed: int
    without_tokens: int

    @property
    def entries(self) -> int:
        """Number of weights of sparse vectors, or of vectors of tokens."""
        if isinstance(self.stored_NF, list):
            return sum(map(len, self.stored_NF))
        return int(self.stored_NF.nnz) if issparse(self.stored_NF) else 0


def input_texts(rows: Iterable[tuple[str, dict[str, Any] | None]], columns: InputColumns) -> Iterator[InputText]:
    """The texts of rows; a blank line is an empty text.

    Raises:
        DataError: a row has no text.
    """
    for number, (place, row) in enumerate(rows):
        if row is None:
            yield InputText(str(number), "", place)
        else:
            column = columns.first(row, "text")
            text = string_of(row, column, place, "--text")
            yield InputText(id_of(row, number, columns), text, place, _fields(row, {column, "id", *columns.ids}))


def _fields(row: Mapping[str, Any], besides: Collection[str]) -> dict[str, str]:
    values = {name: each for name, each in row.items() if isinstance(each, str | int | float) and name not in besides}
    texts = {name: each if isinstance(each, str) else json.dumps(each) for name, each in values.items()}
    return {name: text for name, text in texts.items() if len(text) <= _LONGEST_FIELD}


def blocks_of(
    texts: Iterable[InputText], *, first: int = FIRST_BLOCK, largest: int = LARGEST_BLOCK
) -> Iterator[list[InputText]]:
    """Texts in blocks of doubling size."""
    block: list[InputText] = []
    characters, size = 0, first
    for text in texts:
        block.append(text)
        characters += len(text.text)
        if len(block) >= size or characters >= _LARGEST_CHARACTERS:
            yield block
            block, characters, size = [], 0, min(2 * size, largest)
    if block:
        yield block


AnyEmbedder = Embedder | TokenEmbedder

KnownVectors = Callable[[str], Any]
"""A text to its vector as it is stored, (F,) or a sparse row, if that is known; else None."""


def parts_of(embedder: AnyEmbedder, block: list[InputText], settings: EmbedSettings) -> list[list[Any]]:
    """The sequences of each text, see `Embedder.parts`.

    Raises:
        DataError: a text is too long and `long` is `error`; the message begins with its place.
    """
    try:
        return embedder.parts([each.text for each in block], settings.long, settings.prompt)
    except TooLongError as fault:
        raise DataError(f"{block[fault.number].place}: {fault.reason}") from fault


def embed_block(
    embedder: AnyEmbedder, block: list[InputText], settings: EmbedSettings, known: KnownVectors | None = None
) -> EmbeddedBlock:
    """The vectors of a block, of which only unknown ones are computed.

    Raises:
        DataError: a text is too long and `long` is `error`, or a vector is not finite.
    """
    parts = parts_of(embedder, block, settings)
    found = [None if known is None else known(each.text) for each in block]
    new = [number for number, row in enumerate(found) if row is None]
    rows_NF = _stored_rows(embedder, [parts[number] for number in new], settings)
    if len(new) < len(block):
        old = [number for number, row in enumerate(found) if row is not None]
        rows_NF = _reordered(rows_NF, [found[number] for number in old], np.argsort([*new, *old]).tolist())
    return EmbeddedBlock(
        block,
        rows_NF,
        cut=sum(several[0].cut > 0 for several in parts),
        windowed=sum(len(several) > 1 for several in parts),
        without_tokens=sum(not several[0].ids for several in parts),
    )


def _reordered(first: Any, others: list[Any], order: list[int]) -> Any:
    """The vectors of some texts in stored form and single ones of others, together in this order."""
    every = [*first, *others] if isinstance(first, list) else [first, *others]
    if isinstance(first, list):
        return [every[number] for number in order]
    return (vstack(every, "csr") if issparse(first) else np.vstack(every))[order]


def _stored_rows(embedder: AnyEmbedder, parts: list[list[Any]], settings: EmbedSettings) -> Any:
    """The vectors of texts in stored form, see `EmbeddedBlock`."""
    if isinstance(embedder, TokenEmbedder):
        return [stored(each, settings.dtype) for each in embedder.vectors([first for (first,) in parts])]
    if embedder.is_sparse:
        return embedder.sparse_vectors([first for (first,) in parts])
    computed = embedder.joined(parts) if parts else np.empty((0, embedder.width), np.float32)
    return stored(finished(computed, settings), settings.dtype)


def embedded_blocks(
    embedder: AnyEmbedder,
    blocks: Iterable[list[InputText]],
    settings: EmbedSettings,
    executor: ExecutorSettings | None = None,
    known: KnownVectors | None = None,
) -> Generator[EmbeddedBlock]:
    """The vectors of blocks, in order, computed here or by the workers of an executor, which read the model once each
    and compute all of them.

    Raises:
        DataError: see `embed_block`.
    """
    if executor is None or not executor.is_parallel:
        for block in blocks:
            yield embed_block(embedder, block, settings, known)
        return
    with executor_of(executor, fresh_process=False) as workers:
        jobs = (
            Job(
                f"texts from {block[0].place}",
                partial(_embed_job, embedder.loader, embedder.fingerprint, block, settings),
            )
            for block in blocks
        )
        for done in workers.run(jobs, ordered=True, ahead=_BLOCKS_AHEAD):
            yield done.value


def _embed_job(
    loader: Callable[[], AnyEmbedder], fingerprint: str, block: list[InputText], settings: EmbedSettings
) -> EmbeddedBlock:
    """`embed_block` on a worker.

    Raises:
        DataError: the worker finds a different model at the same path.
    """
    if fingerprint not in _loaded:
        embedder = loader()
        if embedder.fingerprint != fingerprint:
            raise DataError(
                f"{embedder.name}: a worker found different weights at this path; all machines must read the same files"
            )
        _loaded[fingerprint] = embedder
    return embed_block(_loaded[fingerprint], block, settings)


_loaded: dict[str, AnyEmbedder] = {}
"""A worker's models by fingerprint."""


@dataclass(frozen=True)
class EmbeddedFile:
    """A finished file of vectors: its rows, and counts as in `EmbeddedBlock`."""

    out: Path
    count: int
    width: int
    cut: int
    windowed: int
    without_tokens: int
    entries: int


def embed_to_file(
    embedder: AnyEmbedder,
    texts: Iterable[InputText],
    out: Path,
    settings: EmbedSettings,
    *,
    source: Mapping[str, Any] | None,
    executor: ExecutorSettings | None = None,
    known: KnownVectors | None = None,
    progress: Progress = silent_progress,
) -> EmbeddedFile:
    """Write the vectors of all texts, one row each, in order.

    Args:
        embedder: the model.
        texts: read in bounded memory.
        out: .npy, .parquet or .arrow; for sparse vectors .jsonl or .npz.
        settings: how vectors are computed and stored.
        source: identity of the input, the same when a run is continued; None: the run cannot be continued.
        executor: computes the blocks, and says how many at a time; None: this process.
        known: vectors that need not be computed.
        progress: the display.

    Raises:
        UsageError: the file name has no known format, --truncate exceeds the width, or a setting is not one of sparse
            vectors.
        DataError: see `embed_block`; the texts are not those that the unfinished file began with; or another process is
            writing the same file.
        StoppedError: a signal arrived; the rows written so far are kept.
    """
    with writing_alone(out):
        return _written(embedder, texts, out, settings, source, executor, known, progress)


def _written(
    embedder: AnyEmbedder,
    texts: Iterable[InputText],
    out: Path,
    settings: EmbedSettings,
    source: Mapping[str, Any] | None,
    executor: ExecutorSettings | None,
    known: KnownVectors | None,
    progress: Progress,
) -> EmbeddedFile:
    width = check_width(settings, embedder.width, embedder.name)
    key = {
        "model": embedder.fingerprint,
        "precision": embedder.precision,
        "device": embedder.device,
        "settings": settings.model_dump(mode="json"),
        "max_tokens": embedder.max_tokens,
        "source": None if source is None else dict(source),
    }
    file = _file_for(embedder, out, width, settings, key, resumable=source is not None)
    counts = {name: int(file.notes.get(name, 0)) for name in ("cut", "windowed", "without_tokens", "entries")}
    seen = hashlib.blake2b(digest_size=16)
    waiting = iter(texts)
    if file.rows:
        log.info("continuing %s after %s texts", file.out, f"{file.rows:,}")
        for _, text in zip(range(file.rows), waiting, strict=False):
            _note(seen, text)
        if seen.hexdigest() != file.notes.get("texts"):
            raise DataError(f"{out}.part: was begun with other texts; delete it, or restore the input")
    blocks = blocks_of(waiting, first=LARGEST_BLOCK)
    computed = embedded_blocks(embedder, blocks, settings, executor, known)
    meters = progress("texts", unit="texts", start=file.rows)
    with meters as meter, StopRequest() as stop, file.writing(), closing(computed):
        for embedded in computed:
            block = embedded.texts
            for text in block:
                _note(seen, text)
            for name in counts:
                counts[name] += getattr(embedded, name)
            file.append([each.id for each in block], embedded.stored_NF, {**counts, "texts": seen.hexdigest()})
            meter.update(file.rows)
            if stop.reason is not None:
                if source is None:
                    raise StoppedError(f"stopped by {stop.reason}", "a pipe cannot be read again: nothing is kept")
                raise StoppedError(
                    f"stopped by {stop.reason} after {file.rows:,} texts", "give the same command again to continue"
                )
    metadata = {
        "bertkit.model": embedder.name,
        "bertkit.fingerprint": embedder.fingerprint,
        "bertkit.dtype": settings.dtype,
        "bertkit.precision": embedder.precision,
    }
    file.finish(metadata)
    return EmbeddedFile(out, file.rows, width, **counts)


def _file_for(
    embedder: AnyEmbedder, out: Path, width: int, settings: EmbedSettings, key: Mapping[str, Any], *, resumable: bool
) -> VectorFile | SparseVectorFile | TokenVectorFile:
    """The file for a model's kind of vectors, begun or continued.

    Raises:
        UsageError: the file name has no known format, or a setting is not one of this kind of vectors.
    """
    if isinstance(embedder, TokenEmbedder):
        check_token_settings(settings)
        return TokenVectorFile(out, STORED[settings.dtype], width, key, resumable=resumable)
    if embedder.is_sparse:
        check_sparse_settings(settings)
        return SparseVectorFile(out, words_of_vocabulary(embedder), key, resumable=resumable)
    return VectorFile(out, STORED[settings.dtype], stored_width(settings.dtype, width), key, resumable=resumable)


def _note(seen: Any, text: InputText) -> None:
    for part in (text.id, text.text):
        content = part.encode("utf-8", "surrogatepass")
        seen.update(len(content).to_bytes(8, "little"))
        seen.update(content)
