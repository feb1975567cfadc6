"""BM25: ranking by the words that a query and a text share.

Robertson and Zaragoza 2009, The Probabilistic Relevance Framework: BM25 and Beyond, in Lucene's form: the weight of a
term is ln(1 + (N - df + 0.5) / (df + 0.5)) * tf / (tf + k1 (1 - b + b length / mean length)). The weights of all texts
are one sparse matrix. rank_bm25 counts in Python for every query; bm25s would be one more dependency.

Shapes: N texts, W different words.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from scipy.sparse import csc_matrix, load_npz, save_npz

from bertkit.arrays import Float32Array, Int64Array
from bertkit.errors import DataError
from bertkit.files import MAX_LISTING_BYTES, read_json, replacing, write_json

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """Runs of letters, digits and underscores, in lower case."""
    return _WORD.findall(text.lower())


def best_of(score_N: Float32Array, count: int) -> tuple[list[int], list[float]]:
    """The numbers and scores of the texts with the greatest scores above 0; ties in order of the texts."""
    count = min(count, int((score_N > 0).sum()))
    if not count:
        return [], []
    least = np.partition(score_N, -count)[-count]
    candidates = np.flatnonzero(score_N >= least)
    best = candidates[np.argsort(-score_N[candidates], kind="stable")][:count]
    return best.tolist(), score_N[best].tolist()


@dataclass(frozen=True, eq=False)
class Bm25:
    """The weight of every word in every text.

    Attributes:
        words: the column of each word.
        weight_NW: sparse.
    """

    words: dict[str, int]
    weight_NW: csc_matrix

    @classmethod
    def of(cls, texts: Iterable[str]) -> Bm25:
        """Count the words of texts."""
        words: dict[str, int] = {}
        rows, columns, counts, lengths = array("q"), array("q"), array("f"), array("q")
        for row, text in enumerate(texts):
            found = Counter(words_of(text))
            lengths.append(sum(found.values()))
            for word, count in found.items():
                rows.append(row)
                columns.append(words.setdefault(word, len(words)))
                counts.append(count)
        row_X, column_X = np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64)
        count_X, length_N = np.array(counts, dtype=np.float64), np.array(lengths, dtype=np.float64)
        frequency_W = np.bincount(column_X, minlength=len(words))
        idf_W = np.log1p((length_N.size - frequency_W + 0.5) / (frequency_W + 0.5))
        mean = length_N.mean() if length_N.sum() else 1.0
        saturated_X = count_X / (count_X + K1 * (1 - B + B * length_N[row_X] / mean))
        shape = (length_N.size, len(words))
        return cls(words, csc_matrix(((idf_W[column_X] * saturated_X).astype(np.float32), (row_X, column_X)), shape))

    def scores(self, query: str) -> Float32Array:
        """The score of every text, (N,); a word that occurs several times in the query counts as often."""
        found = np.zeros(self.weight_NW.shape[0], dtype=np.float32)
        matrix = self.weight_NW
        for word, times in Counter(words_of(query)).items():
            column = self.words.get(word)
            if column is not None:
                part = slice(matrix.indptr[column], matrix.indptr[column + 1])
                found[matrix.indices[part]] += times * matrix.data[part]
        return found

    def nearest(self, query: str, count: int, rows: Int64Array | None = None) -> tuple[list[int], list[float]]:
        """The numbers and scores of the best texts that share a word with the query; ties in order of the texts. Of
        some texts, their places in `rows`."""
        scores = self.scores(query)
        return best_of(scores if rows is None else scores[rows], count)

    def save(self, directory: Path) -> None:
        """Write bm25.npz and bm25.json."""
        with replacing(directory / "bm25.npz") as file:
            save_npz(file, self.weight_NW, compressed=False)
        write_json(directory / "bm25.json", self.words)

    @classmethod
    def load(cls, directory: Path) -> Bm25:
        """Read the files of `save`.

        Raises:
            DataError: the files are damaged.
        """
        try:
            words = read_json(directory / "bm25.json", max_bytes=MAX_LISTING_BYTES)
            return cls(words, load_npz(directory / "bm25.npz"))
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise DataError(f"{directory / 'bm25.npz'}: cannot be read ({error}); delete it") from error
