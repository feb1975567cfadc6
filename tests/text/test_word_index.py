"""Words are numbered as by a dict, for any length and any collision in the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.text import word_table
from bertkit.text.word_table import BORDER, WordIndex

SEPARATORS = [b" ", b"\0"]
# Lengths on both sides of one and two machine words; differences in the last byte, in the length or only in zeros.
AWKWARD = [
    b"",
    b"\n",
    b"\n\n",
    *(b"abcdefghijklmnopqrstuvwxyz"[:length] for length in (1, 6, 7, 8, 9, 14, 15, 16, 17, 23)),
    *(b"a" * length for length in (7, 8, 15, 16, 17)),
    *(b"a" * length + b"b" for length in (6, 7, 14, 15, 16)),
    *(b"a" + b"\0" * length for length in (1, 6, 7, 14, 15)),
    b"\0" * 8,
    b"\0" * 9,
    "żółć".encode(),
    b"\xff" * 15,
    b"\xff" * 16,
]


def numbered(texts: list[list[bytes]]) -> tuple[list[list[int]], list[bytes]]:
    """The numbers from a plain dict, and the words in their order."""
    known = {BORDER: 0}
    rows = [[known.setdefault(word, len(known)) for word in words] for words in texts]
    return rows, list(known)


def texts_for(separator: bytes, texts: list[list[bytes]]) -> list[list[bytes]]:
    """The same texts, with no separator inside words; a text has at least one word, as with `split`."""
    return [[word for word in words if separator not in word] or [b""] for words in texts]


WORD = st.one_of(st.sampled_from(AWKWARD), st.binary(max_size=20))


@pytest.mark.parametrize("separator", SEPARATORS)
@given(texts=st.lists(st.lists(WORD, max_size=12), max_size=4))
def test_numbers_are_those_of_a_dict(separator: bytes, texts: list[list[bytes]]) -> None:
    texts = texts_for(separator, texts)
    index = WordIndex(separator)
    expected, words = numbered(texts)
    assert [index.numbers(separator.join(text)).tolist() for text in texts] == expected
    assert [BORDER, *index.take_new()] == words
    assert len(index) == len(words)
    assert [index.numbers(separator.join(text)).tolist() for text in texts] == expected  # now all are known
    assert index.take_new() == []


@pytest.mark.parametrize("separator", SEPARATORS)
@pytest.mark.parametrize("bits", [1, 3])
def test_words_that_share_a_place_are_told_apart(monkeypatch: pytest.MonkeyPatch, separator: bytes, bits: int) -> None:
    monkeypatch.setattr(word_table, "PLACE_BITS", bits)
    monkeypatch.setattr(word_table, "CHUNK_WORDS", 2 + bits)
    texts = texts_for(separator, [AWKWARD, AWKWARD[::-1], [b"%d" % (n * n) for n in range(50)], AWKWARD * 2])
    index = WordIndex(separator)
    assert [index.numbers(separator.join(text)).tolist() for text in texts] == numbered(texts)[0]


def test_short_words_are_found_in_the_table() -> None:
    index = WordIndex(b" ")
    content = b" ".join([b"word%d" % n for n in range(200)])
    expected = index.numbers(content).tolist()
    index._numbers.clear()  # later matches are found without the dict
    assert index.numbers(content).tolist() == expected
    assert index.take_new() == [b"word%d" % n for n in range(200)]
