"""Sentences: nothing is lost, abbreviations do not end one, scripts have their own marks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.text.sentences import _BOUNDARY, _FULL_STOP, split_sentences


@given(st.text(alphabet="aB .!?…\"')(1é\u00a0\t-«好。！」とह।؟", max_size=60))
def test_nothing_but_space_is_lost(line: str) -> None:
    sentences = split_sentences(line)
    assert "".join("".join(sentences).split()) == "".join(line.split())
    assert all(sentence == sentence.strip() and sentence for sentence in sentences)


@given(st.text(alphabet="aB .\"')(1é\u00a0\t-", max_size=60))
def test_full_stops_alone_are_found_where_all_marks_are(line: str) -> None:
    found = [match.span() for match in _BOUNDARY.finditer(line)]
    assert [match.span() for match in _FULL_STOP.finditer(line)] == found


@pytest.mark.parametrize(
    "sentences",
    [
        ["It works.", "So it does!", "Does it?", "Yes."],
        ["Dr. J. R. Smith of St. Louis met Mr. Jones on Jan. 5 at 3 p.m. in Washington, D.C. with friends."],
        ["He lives in the U.S. Army barracks.", "They sold it to Acme Inc. The price was low."][:1],
        ["He moved to the U.S.", "The year was 1990."],
        ["See Fig. 3 and eq. 4, e.g. The Times, i.e. Nothing else."],
        ["“Is it?”", "“It is.”", "(So they say.)", "He left."],
        ["It cost 3.5 million.", "In 1990 it was 2.0 times that."],
        ["The game , he said , was over .", "It was 3 – 2 .", "They left ."],
        ["Wait...", "What?", "No!"],
        ["iPhones cost more than e.g. phones by Nokia etc. do."],
        ["C. elegans is a worm.", "E. coli is not."],
        ["«Да!»", "«Ёлка стоит.»", "А. С. Пушкин, т.е. поэт.", "Їжак"],
        ["¿Qué?", "¡Nada!", "Ángel llegó, sr. ñandú."],
    ],
)
def test_sentences_are_found(sentences: list[str]) -> None:
    assert split_sentences(" ".join(sentences)) == sentences


@pytest.mark.parametrize(
    ("separator", "sentences"),
    [
        (
            "",
            ["天气很好。", "他说：“走吧！”，然后走了。", "“好。”", "真的？！", "真的吗?", "用iPad。", "iOS 也好。"],
        ),
        ("", ["彼は「行くよ。」と言った。", "「はい！」", "３．５%です。"]),
        (" ", ["यह एक वाक्य है।", "क्या आप आएँगे?", "हाँ॥"]),
        (" ", ["هل أنت هنا؟", "نعم.", "هذا كتاب.", "کیا حال ہے۔", "ٹھیک"]),
        (" ", ["이것은 책입니다.", "뭐?", "네."]),
        (" ", ["זה ספר.", "מה זה?", "עט"]),
        (" ", ["ეს არის წიგნი.", "Սա գիրք է։", "አገር ናት።", "စာအုပ်ပါ။", "ខ្ញុំ។"]),
    ],
)
def test_each_script_has_its_marks(separator: str, sentences: list[str]) -> None:
    assert split_sentences(separator.join(sentences)) == sentences


@pytest.mark.parametrize(
    "text", ["。" * 100_000 + "、", "！」" * 50_000 + "と", "。" + "」" * 100_000 + "と", "好!" * 50_000]
)
def test_long_runs_of_marks_take_linear_time(text: str) -> None:
    started = time.process_time()
    split_sentences(text)
    assert time.process_time() - started < 2


def test_real_paragraphs_give_sentences_of_usual_length(shared_data: Path) -> None:
    text = (shared_data / "text" / "wikitext2-valid.txt").read_text(encoding="utf-8")
    words = [len(s.split()) for line in text.split("\n") if len(line) > 200 for s in split_sentences(line)]
    assert 18 < sum(words) / len(words) < 32
    assert sum(count < 4 for count in words) / len(words) < 0.01
