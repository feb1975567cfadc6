"""BM25 by its formula, and its file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bertkit.inference.search.bm25 import Bm25, words_of


def test_bm25_is_its_formula() -> None:
    corpus = ["the cat sat on the mat", "a dog", "The cat, the CAT!", ""]
    found = Bm25.of(corpus).scores("cat the the xyz")
    documents = [words_of(text) for text in corpus]
    mean = sum(map(len, documents)) / 4
    for number, words in enumerate(documents):
        expected = 0.0
        for word, times in (("cat", 1), ("the", 2)):
            df = sum(word in each for each in documents)
            tf = words.count(word)
            expected += (
                times * math.log(1 + (4 - df + 0.5) / (df + 0.5)) * tf / (tf + 1.2 * (0.25 + 0.75 * len(words) / mean))
            )
        assert found[number] == pytest.approx(expected, rel=1e-6)
    assert Bm25.of(corpus).nearest("cat", 5)[0] == [2, 0]
    assert Bm25.of(corpus).nearest("xyz", 5) == ([], [])
    assert Bm25.of([""]).nearest("a", 1) == ([], [])


def test_the_words_of_a_large_corpus_are_read(tmp_path: Path) -> None:
    texts = ["the fine cat", "a list of words", "The words, again"]
    Bm25.of(texts).save(tmp_path)
    with (tmp_path / "bm25.json").open("ab") as file:
        file.write(b" " * (65 << 20))
    assert Bm25.load(tmp_path).words == Bm25.of(texts).words
