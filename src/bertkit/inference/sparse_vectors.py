"""Sparse vectors (SPLADE) of a file of texts: the weights of words, as JSON Lines or as a scipy matrix.

A line `{"id": ..., "vector": {word: weight}}` is what Anserini and Pyserini index (JsonVectorCollection). Sibling
embed.py has dense vectors; the texts are the same blocks.

Shapes: N texts of a block, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.sparse import csr_matrix, save_npz, vstack

from bertkit.errors import UsageError
from bertkit.files import replacing
from bertkit.inference.embed import InputText, parts_of
from bertkit.inference.embed_settings import EmbedSettings
from bertkit.inference.embedder import Embedder
from bertkit.progress import Progress, silent_progress

SparseForm = Literal["jsonl", "npz"]
SPARSE_FORMS: dict[str, SparseForm] = {".jsonl": "jsonl", ".npz": "npz"}


@dataclass(frozen=True)
class SparseBlock:
    """The sparse vectors of some texts.

    Attributes:
        texts: in input order.
        weight_NV: a weight for each word.
        cut: number of texts whose end was not read.
        without_tokens: number of texts without tokens; their vectors are zeros.
    """

    texts: list[InputText]
    weight_NV: csr_matrix
    cut: int
    without_tokens: int

    def documents(self, words: list[str]) -> Iterator[dict[str, Any]]:
        """One JSON document per text, the greatest weights first; `words` are those of the vocabulary."""
        matrix = self.weight_NV
        for row, text in enumerate(self.texts):
            part = slice(matrix.indptr[row], matrix.indptr[row + 1])
            order = np.argsort(-matrix.data[part], kind="stable")
            # The shortest decimals that give the same float32.
            weights = matrix.data[part][order].astype("U").astype(np.float64).tolist()
            numbers = matrix.indices[part][order].tolist()
            yield {"id": text.id, "vector": {words[n]: weight for n, weight in zip(numbers, weights, strict=True)}}


def check_sparse_settings(settings: EmbedSettings) -> None:
    """Refuse settings of dense vectors.

    Raises:
        UsageError: one of them is set.
    """
    given = [
        *(["--dtype"] if settings.dtype != "float32" else []),
        *(["--truncate"] if settings.truncate is not None else []),
        *(["--normalise"] if settings.normalise else []),
        *(["--long window"] if settings.long == "window" else []),
    ]
    if given:
        raise UsageError(
            f"{', '.join(given)}: for dense vectors, but the model computes sparse ones (SPLADE); leave it out"
        )


def words_of_vocabulary(embedder: Embedder) -> list[str]:
    """The word of each number of a vector; rows of the embedding table that the tokenizer does not have are [n]."""
    known = embedder.tokenizer.vocab_size
    return [embedder.tokenizer.token(n) if n < known else f"[{n}]" for n in range(embedder.width)]


def sparse_block(embedder: Embedder, block: list[InputText], settings: EmbedSettings) -> SparseBlock:
    """The vectors of a block.

    Raises:
        DataError: a text is too long and `long` is `error`, or a vector is not finite.
    """
    sequences = [first for (first,) in parts_of(embedder, block, settings)]
    return SparseBlock(
        block,
        embedder.sparse_vectors(sequences),
        cut=sum(each.cut > 0 for each in sequences),
        without_tokens=sum(not each.ids for each in sequences),
    )


@dataclass(frozen=True)
class SparseFile:
    """A finished file of sparse vectors: its rows, V, the words with a weight per text, and counts as in
    `SparseBlock`."""

    count: int
    width: int
    mean_words: float
    cut: int
    without_tokens: int


def sparse_to_file(
    embedder: Embedder,
    blocks: Iterable[list[InputText]],
    out: Path,
    settings: EmbedSettings,
    *,
    progress: Progress = silent_progress,
) -> SparseFile:
    """Write the vectors of all texts, in order, to .jsonl, or to .npz, which has no ids.

    Raises:
        DataError: see `sparse_block`.
    """
    words, matrices = words_of_vocabulary(embedder), [csr_matrix((0, embedder.width), dtype=np.float32)]
    count = stored = cut = without = 0
    with replacing(out) as file, progress("texts", unit="texts") as meter:
        for block in blocks:
            found = sparse_block(embedder, block, settings)
            if SPARSE_FORMS[out.suffix] == "jsonl":
                for document in found.documents(words):
                    file.write(json.dumps(document, ensure_ascii=False).encode() + b"\n")
            else:
                matrices.append(found.weight_NV)
            count, stored = count + len(block), stored + found.weight_NV.nnz
            cut, without = cut + found.cut, without + found.without_tokens
            meter.update(count)
        if SPARSE_FORMS[out.suffix] == "npz":
            save_npz(file, vstack(matrices, format="csr"))
    return SparseFile(count, embedder.width, stored / max(1, count), cut, without)
