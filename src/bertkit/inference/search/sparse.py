"""Nearest neighbours of sparse vectors (SPLADE) by the dot product, with an inverted index.

The texts of each word and their weights are stored together, so a query reads only those of its own words. Siblings
vectors.py (dense vectors) and bm25.py (weights of words that are counted).

Shapes: N texts, V words, Q queries, K hits.
"""

from __future__ import annotations

from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from scipy.sparse import csr_matrix, load_npz

from bertkit.arrays import Float32Array, Int64Array
from bertkit.errors import DataError, UsageError
from bertkit.inference.search.bm25 import best_of
from bertkit.inference.search.settings import IndexSettings, embed_settings
from bertkit.inference.sparse_vectors import check_sparse_settings


class SparseIndex:
    """The weights of words in texts, with the method of FAISS's indexes that `vectors.nearest` calls.

    Args:
        weight_NV: of each text.
    """

    def __init__(self, weight_NV: csr_matrix) -> None:
        self.ntotal, self.width = weight_NV.shape
        self._weight_VN = csr_matrix(weight_NV.T)

    def search(self, query_QV: csr_matrix, count: int) -> tuple[Float32Array, Int64Array]:
        """Dot products and numbers of the nearest texts, (Q, K), nearest first; -1 if fewer share a word."""
        shape = (query_QV.shape[0], count)
        score_QK, number_QK = np.zeros(shape, dtype=np.float32), np.full(shape, -1, dtype=np.int64)
        for row in range(query_QV.shape[0]):
            numbers, scores = best_of((query_QV[[row]] @ self._weight_VN).toarray()[0], count)
            score_QK[row, : len(scores)], number_QK[row, : len(numbers)] = scores, numbers
        return score_QK, number_QK


def read_sparse(path: Path, *, count: int, width: int) -> csr_matrix:
    """Read a file of `count` sparse vectors.

    Raises:
        DataError: it is damaged, or contains other vectors.
    """
    try:
        found = csr_matrix(load_npz(path))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{path}: is damaged ({error}); delete the directory and build the index again") from error
    if found.shape != (count, width):
        raise DataError(
            f"{path}: contains {found.shape[0]:,} vectors of {found.shape[1]} numbers, but the texts next to it have"
            f" {count:,} of {width}; delete the directory and build the index again"
        )
    return found


def check_sparse_index(settings: IndexSettings) -> None:
    """Refuse settings of indexes of dense vectors.

    Raises:
        UsageError: one of them is set.
    """
    if settings.kind not in ("auto", "exact"):
        raise UsageError(
            f"--kind {settings.kind}: for dense vectors, but the model computes sparse ones (SPLADE); leave it out"
        )
    check_sparse_settings(embed_settings(settings, "dot"))
