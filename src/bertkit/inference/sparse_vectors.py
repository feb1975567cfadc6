"""Sparse vectors (SPLADE): the weights of words, as JSON Lines or as a scipy matrix, written block by block.

A line `{"id": ..., "vector": {word: weight}}` is what Anserini and Pyserini index (JsonVectorCollection). Sibling
vector_files.py has dense vectors.

Shapes: N texts of a block, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.sparse import csr_matrix, save_npz

from bertkit.files import replacing
from bertkit.inference.embed_settings import EmbedSettings, refuse_settings
from bertkit.inference.embedder import Embedder
from bertkit.inference.part_files import PartFiles

SparseForm = Literal["jsonl", "npz"]
SPARSE_FORMS: dict[str, SparseForm] = {".jsonl": "jsonl", ".npz": "npz"}


def check_sparse_settings(settings: EmbedSettings) -> None:
    """Refuse settings of dense vectors.

    Raises:
        UsageError: one of them is set.
    """
    names = ("dtype", "truncate", "normalise", "long")
    refuse_settings(settings, names, "dense vectors, but the model computes sparse ones (SPLADE)")


def words_of_vocabulary(embedder: Embedder) -> list[str]:
    """The word of each number of a vector; rows of the embedding table that the tokenizer does not have are [n]."""
    known = embedder.tokenizer.vocab_size
    return [embedder.tokenizer.token(n) if n < known else f"[{n}]" for n in range(embedder.width)]


def weights_by_word(weight_NV: csr_matrix, words: list[str]) -> Iterator[dict[str, float]]:
    """The weights of each text, the greatest first; `words` are those of the vocabulary."""
    for row in range(weight_NV.shape[0]):
        part = slice(weight_NV.indptr[row], weight_NV.indptr[row + 1])
        order = np.argsort(-weight_NV.data[part], kind="stable")
        # The shortest decimals that give the same float32.
        weights = weight_NV.data[part][order].astype("U").astype(np.float64).tolist()
        numbers = weight_NV.indices[part][order].tolist()
        yield {words[n]: weight for n, weight in zip(numbers, weights, strict=True)}


def sparse_documents(ids: Sequence[str], weight_NV: csr_matrix, words: list[str]) -> Iterator[dict[str, Any]]:
    """One JSON document per text."""
    for name, vector in zip(ids, weights_by_word(weight_NV, words), strict=True):
        yield {"id": name, "vector": vector}


class SparseVectorFile(PartFiles):
    """A file of sparse vectors that is being written: .jsonl, or .npz, which has no ids.

    Args:
        out: its final name.
        words: of the vocabulary.
        key: see `PartFiles`.
        resumable: see `PartFiles`.
    """

    def __init__(self, out: Path, words: list[str], key: Mapping[str, Any], *, resumable: bool = True) -> None:
        self.form = SPARSE_FORMS[out.suffix]
        self._words = words
        others = ["words", "counts"] if self.form == "npz" else []
        super().__init__(out, key, others=others, resumable=resumable)

    def append(self, ids: Sequence[str], weight_NV: csr_matrix, notes: Mapping[str, Any]) -> None:
        """Write a block; `notes` are the information needed to continue."""
        if self.form == "jsonl":
            lines = (json.dumps(each, ensure_ascii=False) for each in sparse_documents(ids, weight_NV, self._words))
            contents = {"": "".join(f"{line}\n" for line in lines).encode()}
        else:
            contents = {
                "": weight_NV.data.astype(np.float32).tobytes(),
                "words": weight_NV.indices.astype(np.int32).tobytes(),
                "counts": np.diff(weight_NV.indptr).astype(np.int64).tobytes(),
            }
        self.write(weight_NV.shape[0], contents, notes)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Give the complete file its name; neither format has metadata."""
        if self.form == "jsonl":
            self.rename()
            return
        with self.finishing(), replacing(self.out) as file:
            count_N = np.fromfile(self.path("counts"), np.int64)
            start_N = np.concatenate([[0], count_N.cumsum()])
            # Memory maps: a corpus of sparse vectors may exceed the memory; numpy maps no empty files.
            data, columns = (
                np.memmap(path, dtype, "r") if start_N[-1] else np.empty(0, dtype)
                for path, dtype in ((self.part, np.float32), (self.path("words"), np.int32))
            )
            save_npz(file, csr_matrix((data, columns, start_N), shape=(len(count_N), len(self._words))))
