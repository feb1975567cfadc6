"""Phrases in token ids: every match is a phrase, longest first, and an invalid file is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.errors import DataError
from bertkit.text import lexicon
from bertkit.text.lexicon import PhraseTable, read_lexicon
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer
from bertkit.text.words import WordMarks
from tests.text.corpora import english


def found_plainly(
    phrases: list[tuple[int, ...]], ids: list[int], begins: list[bool], run: list[int]
) -> list[tuple[int, int, int]]:
    """Longest first, then from left to right; (start, length, entry)."""
    finds: list[tuple[int, int, int]] = []
    taken: set[int] = set()
    for length in range(6, 0, -1):
        for start in range(len(ids) - length + 1):
            end, place = start + length, range(start, start + length)
            whole = begins[start] and (end == len(ids) or begins[end] or run[end] != run[start])
            free = len({run[t] for t in place}) == 1 and run[start] >= 0 and not taken & set(place)
            if whole and free and tuple(ids[start:end]) in phrases:
                finds.append((start, length, phrases.index(tuple(ids[start:end]))))
                taken.update(place)
    return sorted(finds)


@given(st.data())
def test_finds_are_those_of_a_plain_search(data: st.DataObject) -> None:
    phrase = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
    phrases = data.draw(st.lists(phrase, max_size=8, unique=True))
    size = data.draw(st.integers(0, 30))
    ids = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    begins = data.draw(st.lists(st.sampled_from([True, True, False]), min_size=size, max_size=size))
    run = sorted(data.draw(st.lists(st.integers(-1, 2), min_size=size, max_size=size)))
    finds = PhraseTable(phrases).find(np.array(ids, np.int64), np.array(begins, np.bool_), np.array(run, np.int64))
    found = zip(finds.start_P.tolist(), finds.length_P.tolist(), finds.entry_P.tolist(), strict=True)
    assert list(found) == found_plainly(phrases, ids, begins, run)


def test_no_hash_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash of two bits almost everything collides, but there are no false matches."""
    honest = lexicon._extended
    monkeypatch.setattr(lexicon, "_extended", lambda hash_N, id_N: honest(hash_N, id_N) % np.uint64(4))
    ids = np.random.default_rng(0).integers(0, 40, 900)
    phrases = [[1, 2], [3], [5, 6, 7]]
    finds = PhraseTable(phrases).find(ids, np.ones(900, np.bool_), np.zeros(900, np.int64))
    assert finds.start_P.size > 0
    for start, length, entry in zip(finds.start_P, finds.length_P, finds.entry_P, strict=True):
        assert ids[start : start + length].tolist() == phrases[entry]


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "unigram"])
def test_phrases_are_found_as_the_tokenizer_writes_them_between_signs_too(kind: str) -> None:
    config = TokenizerConfig.model_validate({"type": kind, "vocab_size": 420, "lowercase": True})
    tokenizer = train_tokenizer(config, english(400))
    texts = ["The model", "building a sentence", "the model", "token", "the model " * 40, "Ω"]
    table = PhraseTable.of_texts(texts, tokenizer)
    assert table.found_as_E.tolist() == [0, 1, 0, 3, -1, 5 if kind == "byte-bpe" else -1]
    ids_T, _ = tokenizer.encode_plain(["A token, the model; models of tokens: building a sentence."])
    begins_T = WordMarks.of(tokenizer).begins_T(ids_T, np.arange(ids_T.size) == 0)
    finds = table.find(ids_T, begins_T, np.zeros_like(ids_T))
    assert finds.entry_P.tolist() == [3, 0, 1]  # and not the beginnings of `models` and `tokens`


def test_a_lexicon_is_its_lines_each_once(tmp_path: Path) -> None:
    path = tmp_path / "phrases.txt"
    path.write_text("New York\n\n  Hong Kong \r\nNew York\nSri Lanka", encoding="utf-8")
    assert read_lexicon(path) == ["New York", "Hong Kong", "Sri Lanka"]


def test_a_faulty_lexicon_is_named(tmp_path: Path) -> None:
    path = tmp_path / "phrases.txt"
    with pytest.raises(DataError, match=r"phrases\.txt: no such file"):
        read_lexicon(path)
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(DataError, match=r"phrases\.txt: contains no phrase; write one phrase per line"):
        read_lexicon(path)
    path.write_bytes(b"New York\nZ\xfcrich\n")
    with pytest.raises(DataError, match=r"phrases\.txt: not valid UTF-8 at byte offset 10"):
        read_lexicon(path)
    with pytest.raises(DataError, match="not a regular file but a directory"):
        read_lexicon(tmp_path)
