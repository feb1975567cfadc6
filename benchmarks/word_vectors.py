"""Word vectors of a corpus without a neural network: a baseline as in Sentence-BERT's table 1, trained here.

Levy, Goldberg and Dagan 2015, "Improving Distributional Similarity with Lessons Learned from Word Embeddings", TACL 3:
positive pointwise mutual information of words within a window, with a higher weight for nearer ones and contexts
smoothed by 0.75, then a singular value decomposition scaled by the root of the singular values. Unlike GloVe's vectors
of 840 billion words they need no download, and they come from the text that a small model was pretrained on.

Shapes: N words, E width.

    python -m benchmarks.word_vectors wikipedia-train.txt.xz vectors.txt
    bertkit eval sts --word-vectors vectors.txt --data-dir glue
"""

from __future__ import annotations

import argparse
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import svds

from bertkit.text.word_split import word_places

WINDOW = 5
SMOOTHING = 0.75


def word_ids(corpus: Path, megabytes: float, most: int) -> tuple[list[str], Any]:
    """The most frequent words, lower-cased, and the text as their indices; -1 for a rarer word."""
    with lzma.open(corpus, "rt", encoding="utf-8") as text:
        lower = text.read(int(megabytes * 1e6)).lower()
    found = [word for line in lower.splitlines() for word in _words(line)]
    words = [word for word, _ in Counter(found).most_common(most)]
    number = {word: n for n, word in enumerate(words)}
    return words, np.array([number.get(word, -1) for word in found])


def _words(line: str) -> list[str]:
    return [line[first:end] for first, end in word_places(line)]


def counts(ids_T: Any, size: int) -> Any:
    """How often words co-occur within the window, (N, N); a pair at distance d counts 1 - (d-1)/W."""
    total = sparse.csr_matrix((size, size))
    for distance in range(1, WINDOW + 1):
        left, right = ids_T[:-distance], ids_T[distance:]
        known = (left >= 0) & (right >= 0)
        weight = np.full(int(known.sum()), 1 - (distance - 1) / WINDOW)
        total = total + sparse.coo_matrix((weight, (left[known], right[known])), shape=(size, size)).tocsr()
    return total + total.T


def vectors(count_NN: Any, width: int) -> Any:
    """The left singular vectors of positive mutual information, scaled by the roots of the singular values, (N, E)."""
    word_N = np.asarray(count_NN.sum(axis=1)).ravel()
    context_N = word_N**SMOOTHING
    information = count_NN.tocoo()
    expected = word_N[information.row] * context_N[information.col] / context_N.sum()
    information.data = np.maximum(np.log(information.data / expected), 0)
    information = information.tocsr()
    information.eliminate_zeros()
    left_NE, value_E, _ = svds(information, k=width, random_state=0)
    return left_NE * np.sqrt(value_E)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="A text compressed by xz.")
    parser.add_argument("out", type=Path, help="GloVe's text form: a word and its numbers a line.")
    parser.add_argument("--megabytes", type=float, default=60.0, help="Characters to read, in millions.")
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=128)
    given = parser.parse_args()
    words, ids_T = word_ids(given.corpus, given.megabytes, given.words)
    print(f"{ids_T.size:,} words, {(ids_T >= 0).mean():.1%} among the {len(words):,} most frequent", flush=True)
    vector_NE = vectors(counts(ids_T, len(words)), given.width)
    with given.out.open("w", encoding="utf-8") as file:
        for word, row in zip(words, vector_NE, strict=True):
            print(word, *(f"{number:.5f}" for number in row), file=file)


if __name__ == "__main__":
    main()
