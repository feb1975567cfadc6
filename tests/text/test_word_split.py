"""Words of plain text: the Penn Treebank's rules, exact positions, and CoNLL-2003's own words from its joined
sentences."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.tasks.readers.columns import read_conll
from bertkit.text.passages import paragraph_places, sentence_places_in
from bertkit.text.sentences import sentence_places, split_sentences
from bertkit.text.word_split import whole_words, word_places


def words(text: str) -> str:
    return " | ".join(text[start:end] for start, end in word_places(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I don't, can't or won't.", "I | do | n't | , | ca | n't | or | wo | n't | ."),
        ("It’s the players' and O'Brien's turn", "It | ’s | the | players | ' | and | O'Brien | 's | turn"),
        ("U.S. troops, U.S.-led; the U.S.'s U.N.", "U.S. | troops | , | U.S.-led | ; | the | U.S. | 's | U.N."),
        ("Mr. J. Smith of Acme Corp., Calif.", "Mr. | J. | Smith | of | Acme | Corp. | , | Calif | ."),
        ("a New York-based firm (NASDAQ: X)", "a | New | York-based | firm | ( | NASDAQ | : | X | )"),
        ("$45.5 million, US$5,000, £2 or 30%", "$ | 45.5 | million | , | US$ | 5,000 | , | £ | 2 | or | 30 | %"),
        ("on 1996-08-22, 08/26/96 at 10:30 a.m.", "on | 1996-08-22 | , | 08/26/96 | at | 10:30 | a.m."),
        ("won 6-4 1/2 -3.5 .500 in 1990s", "won | 6-4 | 1/2 | -3.5 | .500 | in | 1990s"),
        ("1. Rose 2. Els, plan B.", "1. | Rose | 2. | Els | , | plan | B | ."),
        ('"Well" -- he said... “so”—then', '" | Well | " | -- | he | said | ... | “ | so | ” | — | then'),
        ("AT&T and S&P 500, [sic] {x}", "AT&T | and | S&P | 500 | , | [ | sic | ] | { | x | }"),
        ("see http://x.org/a?b=1. Mail me@x.org!", "see | http://x.org/a?b=1 | . | Mail | me@x.org | !"),
        ("Café Zu\u0308rich हिन्दी में", "Café | Zu\u0308rich | हिन्दी | में"),
        ("去北京。 ok 😀", "去 | 北 | 京 | 。 | ok | 😀"),
        ("ソニーは8月に人々へ", "ソニー | は | 8 | 月 | に | 人 | 々 | へ"),
        ("นี่ ๑๒ ກີ ခုနှစ် ខ្ញុំ១", "นี่ | ๑๒ | ກີ | ခု | နှ | စ် | ខ្ | ញុំ | ១"),
        ("Ph.D. e.g. and/or No. 1; he said no.", "Ph.D. | e.g. | and | / | or | No. | 1 | ; | he | said | no | ."),
        ("@user #tag reuters.com", "@user | #tag | reuters.com"),
        ("  \n\t ", ""),
    ],
)
def test_words_are_cut_as_in_the_treebank(text: str, expected: str) -> None:
    assert words(text) == expected


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_every_character_but_space_is_in_exactly_one_word(text: str) -> None:
    places = word_places(text)
    assert all(a < b for a, b in places)
    assert all(before[1] <= after[0] for before, after in pairwise(places))
    covered = "".join(text[a:b] for a, b in places)
    assert covered == "".join(each for each in text if not each.isspace())


def test_a_part_of_a_text_has_the_places_of_the_whole() -> None:
    text = "One two. Three four."
    assert [text[a:b] for a, b in word_places(text, 9, 20)] == ["Three", "four", "."]


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("playing the game", (0, 4), "playing"),
        ("replaying it", (2, 6), "replaying"),
        ("about 1,000.5 people", (6, 7), "1,000.5"),
        ("Manning's team", (0, 7), "Manning"),
        ("a Zu\u0308rich-based", (3, 4), "Zu\u0308rich"),
        ("去北京大学", (1, 3), "北京"),
        ("サトシはポケモンを見た", (5, 6), "ポケモン"),
        ("กี่คน", (0, 1), "กี่"),
        ("サトシは", (2, 4), "サトシは"),
        ("the game", (0, 8), "the game"),
        ("the game", (2, 5), "the game"),
        ("the game", (3, 3), ""),
    ],
)
def test_a_range_grows_to_whole_words_alone(text: str, inside: tuple[int, int], expected: str) -> None:
    assert text[slice(*whole_words(text, *inside))] == expected


def test_sentences_have_places() -> None:
    line = "  Mr. Smith left.  He slept! "
    assert [line[a:b] for a, b in sentence_places(line)] == split_sentences(line) == ["Mr. Smith left.", "He slept!"]


def test_paragraphs_end_at_blank_lines_and_at_lines_that_no_page_broke() -> None:
    wrapped = "It was the best of times, it was the\nworst of times, it was the age of\nwisdom.\r\n\r\n"
    listed = "London\nThe Treaty of Rome was signed there\nParis\n \nEnd."
    text = wrapped + listed
    found = [text[a:b] for a, b in paragraph_places(text)]
    assert found == [wrapped.rstrip(), "London", "The Treaty of Rome was signed there", "Paris", "End."]
    lines = "Short. More.\n" + "x" * 130 + "\n" + "y" * 125
    assert [lines[a:b] for a, b in paragraph_places(lines)] == lines.split("\n")
    first = next(paragraph_places(listed[:6] + " It was. He came."))
    assert sentence_places_in(listed[:6] + " It was. He came.", first) == [(0, 14), (15, 23)]
    assert not list(paragraph_places(" \n\n "))


def test_the_words_of_conll_are_found_again_in_its_sentences(shared_data: Path) -> None:
    examples = read_conll(shared_data / "conll2003" / "eng.testa").examples
    right = total = predicted = 0
    for example in examples:
        text = " ".join(example.words)
        ends, at = set(), 0
        for word in example.words:
            ends.add((at, at + len(word)))
            at += len(word) + 1
        found = set(word_places(text))
        right, total, predicted = right + len(found & ends), total + len(ends), predicted + len(found)
    assert right / total > 0.99
    assert right / predicted > 0.99
