"""Sequences: special tokens as in `transformers`, BERT's truncation, windows that lose nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from bertkit.errors import UsageError
from bertkit.tasks.encoding import SequenceEncoder, cut_longer, windows
from bertkit.text.tokenizer_files import save_tokenizer
from tests.tasks.tiny_task import tiny_tokenizer

FIRST, SECOND = "the cat is fine", "a cold list of words"


@pytest.mark.parametrize("pair", [None, SECOND])
def test_sequences_are_those_of_transformers(tmp_path: Path, pair: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = tiny_tokenizer()
    save_tokenizer(tokenizer, tmp_path)
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)(FIRST, pair, return_token_type_ids=True)
    encoder = SequenceEncoder(tokenizer, max_tokens=40)
    parts = encoder.ids([FIRST] if pair is None else [FIRST, pair])
    ids, types = encoder.sequence(*parts, example="0")
    assert ids == oracle["input_ids"]
    assert types == oracle["token_type_ids"]


def test_special_tokens_stand_where_the_family_puts_them() -> None:
    """RoBERTa separates two texts by two separators; XLNet's classifier token comes last, with its own type."""
    tokenizer = tiny_tokenizer()
    cls_id, sep_id = tokenizer.cls_id, tokenizer.sep_id
    special = [("[CLS]", cls_id), ("[SEP]", sep_id)]
    (first, second) = SequenceEncoder(tokenizer, max_tokens=40).ids([FIRST, SECOND])

    tokenizer.backend.post_processor = processors.RobertaProcessing(("[SEP]", sep_id), ("[CLS]", cls_id))
    ids, types = SequenceEncoder(tokenizer, max_tokens=40).sequence(first, second, example="0")
    assert ids == [cls_id, *first, sep_id, sep_id, *second, sep_id]
    assert set(types) == {0}

    template: Any = processors.TemplateProcessing(
        single="$A [SEP] [CLS]:2", pair="$A [SEP] $B:1 [SEP]:1 [CLS]:2", special_tokens=special
    )
    tokenizer.backend.post_processor = template
    encoder = SequenceEncoder(tokenizer, max_tokens=40)
    ids, types = encoder.sequence(first, second, example="0")
    assert ids == [*first, sep_id, *second, sep_id, cls_id]
    assert types == [0] * (len(first) + 1) + [1] * (len(second) + 1) + [2]
    assert encoder.room(2) == 37
    assert set(SequenceEncoder(tokenizer, max_tokens=40, token_types=False).sequence(first, example="0")[1]) == {0}


def test_a_separator_in_the_text_is_text() -> None:
    encoder = SequenceEncoder(tiny_tokenizer(), max_tokens=40)
    (ids,) = encoder.ids(["the cat [SEP] is fine"])
    assert encoder.tokenizer.sep_id not in ids
    assert [encoding.ids for encoding in encoder.encodings(["the cat [SEP] is fine"])] == [ids]


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 40))
def test_the_cut_is_berts_loop(first: int, second: int, room: int) -> None:
    """run_classifier.py removes tokens from the longer text, or from the second if they are equal, until both fit."""
    a, b = list(range(first)), list(range(second))
    while len(a) + len(b) > room:
        (a if len(a) > len(b) else b).pop()
    assert cut_longer(list(range(first)), list(range(second)), room) == (a, b)


@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 30))
def test_windows_cover_the_text_and_fit(length: int, room: int, stride: int) -> None:
    ids = list(range(length))
    found = list(windows(ids, room, stride))
    assert all(len(piece) <= room and piece == ids[start : start + room] for start, piece in found)
    assert sorted({i for _, piece in found for i in piece}) == ids
    assert len(found) == 1 or found[-2][0] + room < length


def test_no_room_for_text_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"data\.max_length is 4"):
        SequenceEncoder(tiny_tokenizer(), max_tokens=4)
