"""BM25: ranking by the words that a query and a text share.

Robertson and Zaragoza 2009, The Probabilistic Relevance Framework: BM25 and Beyond, in Lucene's form: the weight of a
term is ln(1 + (N - df + 0.5) / (df + 0.5)) * tf / (tf + k1 (1 - b + b length / mean length)). The weights of all texts
are one sparse matrix. rank_bm25 counts in Python for every query; bm25s would be one more dependency.

Shapes: N texts, W different words.
"""

from __future__ import annotations

import re
import unicodedata
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
from bertkit.text.word_split import search_pattern

K1, B = 1.2, 0.75
RULES = 2
"""The version of `words_of`."""
_ASCII_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """Runs of letters, digits, marks and underscores, in lower case.

    In scripts without spaces they are the single characters and the pairs of adjacent ones (Nie et al. 2000, On the use
    of words and n-grams for Chinese information retrieval). Compatible forms of a character, such as full-width
    letters, are one.
    """
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    words: list[str] = []
    before, end = "", -1
    normal = unicodedata.normalize("NFKC", text).lower().replace("i\u0307", "i")  # of the Turkish capital
    for match in search_pattern().finditer(normal):
        words.append(match[0])
        if match[1] is None:
            continue
        if match.start() == end:
            words.append(before + match[1])
        before, end = match[1], match.end()
    return words


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
        write_json(directory / "bm25.json", {"rules": RULES, "words": self.words})

    @classmethod
    def load(cls, directory: Path) -> Bm25 | None:
        """Read the files of `save`; None if there are none, or if their texts were split into words by other rules.

        Raises:
            DataError: the files are damaged.
        """
        if not (directory / "bm25.json").is_file():
            return None
        try:
            stored = read_json(directory / "bm25.json", max_bytes=MAX_LISTING_BYTES)
            words = stored.get("words")
            if stored.get("rules") != RULES or not isinstance(words, dict):
                return None  # the file of an earlier version, which was a table of words
            return cls(words, load_npz(directory / "bm25.npz"))
        except (OSError, ValueError, KeyError, AttributeError, BadZipFile) as error:
            raise DataError(f"{directory / 'bm25.npz'}: cannot be read ({error}); delete it") from error
