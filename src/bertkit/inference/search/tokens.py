"""Nearest texts by late interaction (ColBERT), with cells of token vectors that name candidates.

Khattab and Zaharia 2020, arXiv:2004.12832 (MaxSim); Santhanam et al. 2022, PLAID, arXiv:2205.09707, section 4.1 (the
candidates of a query are the texts with a token in the cells nearest to one of the query's tokens). Here all candidates
are scored exactly, with whole vectors: PLAID's pruning by centres and its residuals are left out, so if all cells are
probed, the hits are those of a search of all texts. Siblings vectors.py (one vector per text) and sparse.py.

Shapes: N texts, M tokens of all texts, C cells, Q tokens of a query, E width, K hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from bertkit.arrays import Float32Array, Int64Array, save_arrays
from bertkit.errors import DataError, UsageError
from bertkit.files import replacing
from bertkit.inference.search import vectors
from bertkit.inference.search.settings import IndexKind
from bertkit.inference.token_vectors import TokenVectors
from bertkit.progress import Progress, silent_progress

EXACT_UP_TO = 1_000_000
"""Number of token vectors up to which `auto` compares all of them."""
DEFAULT_PROBES = 8
_BLOCK = 65_536
"""Token vectors that are read at once."""


def kind_for(kind: str, tokens: int) -> IndexKind:
    """The kind of index; `auto` chooses by the number of token vectors.

    Raises:
        UsageError: there is no such kind for token vectors.
    """
    if kind == "hnsw":
        raise UsageError(
            "--kind hnsw: for one vector per text, but the model computes one for each token (ColBERT); give --kind ivf"
            " or exact"
        )
    return ("exact" if tokens <= EXACT_UP_TO else "ivf") if kind == "auto" else kind  # type: ignore[return-value]  # the other values of the setting


class TokenCells:
    """The centres of cells, and the texts with a token in each.

    Attributes:
        centre_CE: of unit length.
        start_C: the first of each cell's texts, and the number of all of them.
        texts: the numbers of the texts of all cells.
    """

    def __init__(self, centre_CE: Float32Array, start_C: Int64Array, texts: Int64Array) -> None:
        self.centre_CE, self.start_C, self.texts = centre_CE, start_C, texts

    @classmethod
    def of(cls, tokens: TokenVectors, *, progress: Progress = silent_progress) -> TokenCells:
        """Find the centres by k-means on vectors from the whole corpus, and the cell of each token."""
        library = vectors.faiss()
        count, width = tokens.vector_ME.shape
        cells = vectors.training_cells(count)
        chosen = vectors.training_rows(count, cells)
        means = library.Kmeans(width, cells, niter=10, spherical=True)
        means.train(tokens.rows(chosen))
        centre_CE: Float32Array = means.centroids
        nearest = library.IndexFlatIP(width)
        nearest.add(centre_CE)
        cell_M = np.empty(count, dtype=np.int64)
        with progress("index", total=count, unit="vectors") as meter:
            for first in range(0, count, _BLOCK):
                block = tokens.rows(slice(first, first + _BLOCK))
                cell_M[first : first + len(block)] = nearest.search(block, 1)[1][:, 0]
                meter.update(first + len(block))
        text_M = np.repeat(np.arange(tokens.shape[0]), np.diff(tokens.start_N))
        cell_and_text = np.unique(cell_M * tokens.shape[0] + text_M)
        cell, texts = np.divmod(cell_and_text, tokens.shape[0])
        return cls(centre_CE, np.searchsorted(cell, np.arange(cells + 1)), texts)

    def candidates(self, query_QE: Float32Array, probes: int) -> Int64Array:
        """The texts with a token in one of the cells nearest to a token of the query, in order."""
        product_QC = query_QE @ self.centre_CE.T
        cells = np.unique(np.argpartition(-product_QC, probes - 1, axis=1)[:, :probes])
        return np.unique(np.concatenate([self.texts[self.start_C[cell] : self.start_C[cell + 1]] for cell in cells]))

    def save(self, path: Path) -> None:
        """Write a .npz file."""
        with replacing(path) as file:
            save_arrays(file, centres=self.centre_CE, starts=self.start_C, texts=self.texts)

    @classmethod
    def read(cls, path: Path) -> TokenCells:
        """Read the file of `save`.

        Raises:
            DataError: it is damaged.
        """
        try:
            with np.load(path) as found:
                return cls(found["centres"], found["starts"], found["texts"])
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise DataError(f"{path}: is damaged ({error}); delete the directory and build the index again") from error


class TokenIndex:
    """Token vectors with the methods of FAISS's indexes that `vectors.nearest` and `set_probes` call.

    Args:
        tokens: of the texts.
        cells: None: all texts are scored.
        texts: without cells, the numbers of those that are searched, in the order of their new numbers; None: all.
    """

    default_probes = DEFAULT_PROBES

    def __init__(self, tokens: TokenVectors, cells: TokenCells | None, texts: Int64Array | None = None) -> None:
        self._texts = np.arange(tokens.shape[0]) if texts is None else texts
        self.ntotal = len(self._texts)
        self.nprobe, self.nlist = DEFAULT_PROBES, 1 if cells is None else len(cells.centre_CE)
        self._tokens, self._cells = tokens, cells

    def search(self, queries: Sequence[Float32Array], count: int) -> tuple[Float32Array, Int64Array]:
        """Scores and numbers of the best texts of each query, (queries, K), best first; -1 if there are fewer
        candidates. Ties in order of the texts."""
        shape = (len(queries), count)
        score_QK, number_QK = np.zeros(shape, dtype=np.float32), np.full(shape, -1, dtype=np.int64)
        for row, query_QE in enumerate(queries):
            if self._cells is None or self.nprobe >= self.nlist:
                texts = np.arange(self.ntotal)
            else:
                texts = self._cells.candidates(query_QE, self.nprobe)
            scores = self._scores(query_QE, self._texts[texts])
            best = np.argsort(-scores, kind="stable")[:count]
            score_QK[row, : len(best)], number_QK[row, : len(best)] = scores[best], texts[best]
        return score_QK, number_QK

    def _scores(self, query_QE: Float32Array, texts: Int64Array) -> Any:
        """MaxSim with each of these texts, in float64."""
        start, length = self._tokens.start_N[texts], np.diff(self._tokens.start_N)[texts]
        found, first = np.empty(len(texts)), 0
        ends = length.cumsum()
        while first < len(texts):
            last = max(first + 1, int(np.searchsorted(ends, (ends[first - 1] if first else 0) + _BLOCK, "right")))
            part = slice(first, last)
            begins = length[part].cumsum() - length[part]  # of each text in the block
            rows = np.arange(length[part].sum()) + np.repeat(start[part] - begins, length[part])
            product_MQ = self._tokens.rows(rows) @ query_QE.T
            found[part] = np.maximum.reduceat(product_MQ, begins, axis=0).astype(np.float64).sum(axis=1)
            first = last
        return found
