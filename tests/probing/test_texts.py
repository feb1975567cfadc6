"""Sentences as the model reads them: the tokens of words are the ids, for any tokenizer; losses are reported."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.probing.sentences import (
    NO_TOKENS,
    NO_WORDS,
    TOO_LONG,
    EncodedSentence,
    Sentence,
    TextEncoder,
    batches,
    is_punctuation,
    packed,
)
from tests.probing.tiny_models import TEXTS, tiny_tokenizer
from tests.text.corpora import AWKWARD, english

KINDS = ["wordpiece", "byte-bpe", "unigram"]
ODD = [*TEXTS, *AWKWARD, "[MASK] is text, and [SEP] too", "a  b   c", "don't won't"]


def encoder_of(kind: str, **settings: object) -> TextEncoder:
    sizes = {"wordpiece": 110, "byte-bpe": 300, "unigram": 110}
    return TextEncoder(tiny_tokenizer(kind, sizes[kind]), max_tokens=600, **settings)


def word_ids(encoded: EncodedSentence) -> list[int]:
    return [i for start, end in encoded.spans_W2.tolist() for i in encoded.ids_T[start:end].tolist()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut_into", ["words", "spaces"])
def test_pieces_of_the_words_end_to_end_are_the_ids(kind: str, cut_into: str) -> None:
    encoder = encoder_of(kind, cut_into=cut_into)
    encoded = list(encoder.encode(Sentence(str(n), text) for n, text in enumerate(ODD)))
    assert len(encoded) >= len(ODD) - 6
    for sentence in encoded:
        assert all(sentence.words)
        assert len(sentence.words) == len(sentence.spans_W2)
        assert word_ids(sentence) == sentence.ids_T[~sentence.special_T].tolist()
        for word, (start, end) in enumerate(sentence.spans_W2.tolist()):
            assert start < end
            assert set(sentence.word_T[start:end].tolist()) == {word}


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_the_tokenizer(kind: str) -> None:
    encoder = encoder_of(kind)
    texts = english(19, seed=5)
    for text, encoded in zip(texts, encoder.encode(Sentence("x", each) for each in texts), strict=True):
        assert encoded.ids_T.tolist() == encoder.tokenizer.backend.encode(text).ids
        assert "".join(encoded.words) == text.replace(" ", "")


def test_words_are_as_they_are_written_and_marks_are_words() -> None:
    encoder = encoder_of("wordpiece")
    (encoded,) = encoder.encode([Sentence("x", "The readers, modelable!")])
    assert encoded.words == ("The", "readers", ",", "modelable", "!")
    assert encoded.punctuation_W.tolist() == [False, False, True, False, True]
    assert [encoded.places(encoder.tokenizer.cls_id), encoded.places(encoder.tokenizer.sep_id)] == [
        [0],
        [encoded.ids_T.size - 1],
    ]
    (by_space,) = encoder_of("wordpiece", cut_into="spaces").encode([Sentence("x", "The readers, modelable!")])
    assert by_space.words == ("The", "readers,", "modelable!")
    assert by_space.ids_T.tolist() == encoded.ids_T.tolist()


@settings(max_examples=30)
@given(st.lists(st.lists(st.sampled_from(["the", "reader", "tests", ".", "walkable", "a"]), min_size=1), min_size=1))
def test_given_words_stay_whole_and_in_order(sentences: list[list[str]]) -> None:
    encoder = encoder_of("wordpiece")
    given_words = [Sentence(str(n), words=tuple(words)) for n, words in enumerate(sentences)]
    for sentence, encoded in zip(given_words, encoder.encode(given_words), strict=True):
        assert encoded.words == sentence.words
        alone = [next(iter(encoder.encode([Sentence("x", words=(word,))]))) for word in encoded.words]
        assert word_ids(encoded) == [i for each in alone for i in word_ids(each)]


def test_what_cannot_be_read_is_counted_and_named() -> None:
    tokenizer = tiny_tokenizer()
    encoder = TextEncoder(tokenizer, max_tokens=12)
    sentences = [
        Sentence("good", "The reader tests."),
        Sentence("blank", "  "),
        Sentence("long", "the tokens of the sentences in the written files " * 3),
        Sentence("odd", words=("the", "\u200b", "reader")),
        Sentence("also good", "A value"),
    ]
    encoded = list(encoder.encode(sentences))
    assert [(each.name, each.number) for each in encoded] == [("good", 0), ("also good", 4)]
    assert encoder.notes.counts == {NO_WORDS: 1, TOO_LONG: 1, NO_TOKENS: 1}
    assert encoder.notes.named[TOO_LONG][0].startswith("long: the tokens of the")
    assert encoder.notes.named[NO_TOKENS][0].startswith("odd: the")


def test_a_sentence_of_exactly_the_limit_is_read() -> None:
    tokenizer = tiny_tokenizer()
    (whole,) = TextEncoder(tokenizer, max_tokens=99).encode([Sentence("x", "The reader tests a document.")])
    size = whole.ids_T.size
    assert (
        len(list(TextEncoder(tokenizer, max_tokens=size).encode([Sentence("x", "The reader tests a document.")]))) == 1
    )
    assert not list(TextEncoder(tokenizer, max_tokens=size - 1).encode([Sentence("x", "The reader tests a document.")]))


def test_a_tokenizer_that_cuts_nothing_gets_words_at_spaces() -> None:
    tokenizer = tiny_tokenizer()
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    backend.pre_tokenizer = None
    bare = type(tokenizer)(backend, tokenizer.roles)
    (encoded,) = TextEncoder(bare, max_tokens=99).encode([Sentence("x", "the reader tests")])
    assert encoded.words == ("the", "reader", "tests")


@pytest.mark.parametrize("pool", [1, 5, 100])
def test_batches_hold_every_sentence_once_within_the_budget(pool: int) -> None:
    sentences = list(encoder_of("wordpiece").encode(Sentence(str(n), text) for n, text in enumerate(english(31))))
    found = list(batches(sentences, 70, pool=pool))
    assert sorted(each.number for batch in found for each in batch) == list(range(31))
    assert all(len(batch) == 1 or sum(each.ids_T.size for each in batch) <= 70 for batch in found)
    if pool == 1:
        assert [each.number for batch in found for each in batch] == list(range(31))
    if pool == 100:
        lengths = [each.ids_T.size for batch in found for each in batch]
        assert lengths == sorted(lengths)


def test_a_packed_batch_has_the_sentences_end_to_end() -> None:
    sentences = list(encoder_of("wordpiece").encode(Sentence("x", text) for text in TEXTS))
    batch = packed(sentences)
    assert batch.ids_T.tolist() == np.concatenate([each.ids_T for each in sentences]).tolist()
    assert batch.sequences.cu_seqlens_B1.diff().tolist() == [each.ids_T.size for each in sentences]


def test_punctuation_is_signs_alone() -> None:
    assert [is_punctuation(word) for word in ["...", "``", "-LRB-", "a.", "", "§", "5"]] == [
        True, True, False, False, False, True, False,
    ]  # fmt: skip
