"""Word beginnings are the same for any kind of vocabulary."""

from __future__ import annotations

import re
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from bertkit.errors import UsageError
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig, TokenizerType
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.text.vocabulary import train_tokenizer
from bertkit.text.words import WordMarks
from tests.text.corpora import english

KINDS: list[TokenizerType] = ["wordpiece", "byte-bpe", "unigram"]
WORD = re.compile(r"\w+|[^\w\s]+")


def words(tokenizer: Tokenizer, segments: list[str]) -> list[str]:
    """The words of concatenated segments, as text."""
    ids_T, _ = tokenizer.encode_plain(segments)
    begins_T = WordMarks.of(tokenizer).begins_T(ids_T, np.arange(ids_T.size) == 0)
    return [tokenizer.decode(ids).replace(" ", "") for ids in np.split(ids_T, np.flatnonzero(begins_T)[1:])]


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_those_of_the_text_for_every_kind_of_vocabulary(kind: TokenizerType) -> None:
    texts = [*english(400), *['"quotes", (brackets); and others'] * 20]
    tokenizer = train_tokenizer(TokenizerConfig(type=kind, vocab_size=420, lowercase=True), texts)
    segments = ['The sentence, "a document"; (the model) is building.', "Value of the runners.", "It tested."]
    expected = [word for segment in segments for word in WORD.findall(segment.lower())]
    if kind == "wordpiece":  # which keeps every sign apart
        expected = [part for word in expected for part in (word if not word.isalnum() else [word])]
    assert words(tokenizer, segments) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_words_of_real_text_never_hold_a_space_and_mix_signs_and_letters_only_inside_a_piece(
    kind: TokenizerType, shared_data: Path
) -> None:
    lines = (shared_data / "text" / "wikitext2-valid.txt").read_text(encoding="utf-8").split("\n")
    texts = [line for line in lines if len(line) > 200][:120]
    tokenizer = train_tokenizer(TokenizerConfig(type=kind, vocab_size=1500, lowercase=False), texts)
    marks = WordMarks.of(tokenizer)
    ids_T, _ = tokenizer.encode_plain(texts)
    begins_T = marks.begins_T(ids_T, np.arange(ids_T.size) == 0)
    parts = np.split(ids_T, np.flatnonzero(begins_T)[1:])
    assert len(parts) < 0.8 * ids_T.size
    for ids in parts:
        assert " " not in tokenizer.decode(ids).strip()
        if marks.cuts_at_signs:
            assert not (marks.sign_V[ids].any() and marks.letters_V[ids].any())


@pytest.mark.parametrize("kind", ["byte-bpe", "bpe", "unigram"])
def test_each_token_is_a_word_in_scripts_without_spaces(kind: TokenizerType) -> None:
    pairs = ["".join(pair) for pair in permutations(["今天", "天气", "很好", "公园"], 2)]
    config = TokenizerConfig(type=kind, vocab_size=340 if kind == "byte-bpe" else 60, lowercase=False)
    tokenizer = train_tokenizer(config, [*pairs, "पृष्ठ में पृष्ठ", "，。"] * 9)
    segment = "今天天气很好，公园今天很好。 पृष्ठ में"
    found = words(tokenizer, [segment])
    assert "".join(found).replace(",", "，") == segment.replace(" ", "")
    assert all(len(word) <= 4 for word in found[:-2])  # no token has more, but a clause has six
    assert found[-2:] == ["पृष्ठ", "में"]


def test_the_first_word_of_a_segment_begins_a_word_in_robertas_vocabulary(shared_data: Path) -> None:
    """It has no mark there because nothing precedes it."""
    tokenizer = load_tokenizer(shared_data / "vocabularies" / "roberta" / "vocab.json")
    assert words(tokenizer, ["It rained.", "The ground was wet."]) == [
        *("It", "rained", "."),
        *("The", "ground", "was", "wet", "."),
    ]


def test_a_vocabulary_that_marks_no_words_is_refused() -> None:
    roles = {role: f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    pieces = {token: number for number, token in enumerate([*roles.values(), "a", "b", "c"])}
    every = Backend(models.WordPiece(pieces, unk_token="[UNK]"))
    none = Backend(models.WordLevel(pieces, unk_token="[UNK]"))
    none.pre_tokenizer, none.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    unmarked = Backend(models.WordLevel(pieces, unk_token="[UNK]"))
    for backend, why in ((every, "every token"), (none, "no token"), (unmarked, "does not mark")):
        backend.add_special_tokens([AddedToken(token, special=True) for token in roles.values()])
        with pytest.raises(UsageError, match=why) as fault:
            WordMarks.of(Tokenizer(backend, roles))
        assert "units" in str(fault.value)
        assert "tokenizer.type wordpiece" in str(fault.value)
