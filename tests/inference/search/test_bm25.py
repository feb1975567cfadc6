"""BM25 by its formula, and its file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bertkit.files import write_json
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
    loaded = Bm25.load(tmp_path)
    assert loaded is not None
    assert loaded.words == Bm25.of(texts).words


@pytest.mark.parametrize(
    ("query", "text", "other"),
    [
        ("हिन्दी की", "हिन्दी में", "हानि की दर"),
        ("北京天气", "今天北京下雨", "天下"),
        ("水", "喝水吧", "吃饭"),
        ("กรุงเทพ", "ฉันไปกรุงเทพกับแม่", "เทพา"),
        ("ﾎﾟｹﾓﾝ", "ポケモンカード", "モンポ"),
        ("istanbul", "İstanbul güzel", "ankara"),
    ],
)
def test_words_of_other_scripts_are_found(query: str, text: str, other: str) -> None:
    found = Bm25.of([other, text, "a", "b"]).scores(query)
    assert found[1] > found[0]


def test_words_of_other_rules_are_counted_again(tmp_path: Path) -> None:
    Bm25.of(["a", "b"]).save(tmp_path)
    write_json(tmp_path / "bm25.json", {"rules": 2, "words": 1})  # an earlier version's table of these two words
    assert Bm25.load(tmp_path) is None
