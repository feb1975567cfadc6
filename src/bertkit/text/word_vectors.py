"""Word vectors from a text file in the formats of GloVe and word2vec.

Pennington et al. 2014, "GloVe: Global Vectors for Word Representation" (a word and its numbers per line, separated by
spaces); Mikolov et al. 2013, word2vec (the same after a line with two numbers: words and width).

Shapes: N words, E width.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np

from bertkit.arrays import Float32Array
from bertkit.errors import DataError
from bertkit.text.lines import read_lines


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Words and their vectors in file order, usually most frequent first.

    Attributes:
        words: without duplicates.
        vector_NE: their vectors.
    """

    words: tuple[str, ...]
    vector_NE: Float32Array

    @property
    def width(self) -> int:
        """E."""
        return int(self.vector_NE.shape[1])

    @cached_property
    def number(self) -> dict[str, int]:
        """The number of each word."""
        return {word: number for number, word in enumerate(self.words)}

    def nearest(self, word: str, count: int) -> list[str]:
        """The words with the greatest cosine to this one, without itself; none for an unknown word."""
        at = self.number.get(word)
        if at is None:
            return []
        cosine_N = self._unit_NE @ self._unit_NE[at]
        cosine_N[at] = -np.inf
        count = min(count, cosine_N.size - 1)
        best = np.argpartition(-cosine_N, count)[:count] if count < cosine_N.size - 1 else np.argsort(-cosine_N)[:count]
        return [self.words[number] for number in best[np.argsort(-cosine_N[best], kind="stable")]]

    @cached_property
    def _unit_NE(self) -> Float32Array:
        length_N1 = np.linalg.norm(self.vector_NE, axis=1, keepdims=True)
        return np.asarray(self.vector_NE / np.maximum(length_N1, 1e-12), dtype=np.float32)


def read_word_vectors(path: Path, *, only: Collection[str] | None = None, most_words: int | None = None) -> WordVectors:
    """Vectors of a file; for a repeated word, the first one.

    Args:
        path: the file; .gz, .xz, .bz2 and .zst are decompressed.
        only: words to keep; None: all.
        most_words: stop reading after this many words.

    Raises:
        DataError: the file cannot be read, or a line does not contain a word and as many numbers as the others.
    """
    rows: dict[str, Float32Array] = {}
    width = 0
    for number, line in enumerate(chain.from_iterable(read_lines(path)), start=1):
        fields = line.rstrip().split(" ")
        if number == 1 and len(fields) == 2 and all(re.fullmatch("[0-9]{1,9}", field) for field in fields):
            width = int(fields[1])
            continue
        if not line or line.isspace():
            continue
        # A word may contain spaces; the first line's does not.
        width = width or len(fields) - 1
        word = " ".join(fields[:-width]) if width else ""
        if not word:
            raise DataError(
                f"{path}, line {number}: {len(fields)} fields, expected a word and {width or 'its'} numbers, as GloVe"
                " and word2vec write them"
            )
        if word in rows or (only is not None and word not in only):
            continue
        try:
            rows[word] = np.array(fields[-width:], dtype=np.float32)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {word!r}: {error}; expected {width} numbers") from error
        if not np.isfinite(rows[word]).all():
            raise DataError(f"{path}, line {number}: {word!r} has numbers that are not finite")
        if most_words is not None and len(rows) == most_words:
            break
    if not width:
        raise DataError(f"{path}: contains no word vectors; expected lines of a word and its numbers")
    return WordVectors(tuple(rows), np.stack(list(rows.values())) if rows else np.zeros((0, width), np.float32))
