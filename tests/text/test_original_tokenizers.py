"""Ids of published vocabularies equal those of the original tokenizers, on real lines and on difficult text.

Two deliberate differences, each with a test here:

- Words of 101 to 200 characters are split into tokens, as in google-research/bert; the Hub's classes map words of more
  than 100 characters to [UNK]. Longer words are [UNK] everywhere.
- Lower-casing works character by character, as in the Hub's classes in Rust; with Python's `str.lower` in the original
  code, a capital sigma at a word's end becomes ς.
"""

from __future__ import annotations

import itertools
import lzma
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from tests.text.corpora import AWKWARD
from tests.text.test_sentencepiece import NASTY

transformers = pytest.importorskip("transformers")

REAL_LINES = 10_000
SLOW_LINES = 2_000
LONG_WORDS = [f"before {'x' * 100} after", f"{'ab' * 50}.", "y" * 201, "é" * 99, f"{'漢' * 120} {'z' * 1000}"]


@pytest.fixture(scope="module")
def real_lines(shared_data: Path) -> list[str]:
    with lzma.open(shared_data / "text" / "wikipedia-train.txt.xz", "rt", encoding="utf-8") as file:
        lines = [line.rstrip("\n") for line in itertools.islice(file, REAL_LINES)]
    assert len(lines) == REAL_LINES
    return lines


def nasty_lines() -> list[str]:
    """All difficult texts, without their words of 101 to 200 characters."""
    lines = [*AWKWARD, *NASTY, *LONG_WORDS]
    return [" ".join(word for word in line.split(" ") if not 100 < len(word) <= 200) for line in lines]


def bert(directory: Path) -> Any:
    return transformers.BertTokenizer(str(directory / "vocab.txt"), do_lower_case="uncased" in directory.name)


def gpt2(directory: Path) -> Any:
    return transformers.GPT2Tokenizer(str(directory / "encoder.json"), str(directory / "vocab.bpe"))


def roberta(directory: Path) -> Any:
    return transformers.RobertaTokenizer(str(directory / "vocab.json"), str(directory / "merges.txt"))


def assert_ids_equal(tokenizer: Tokenizer, original: Any, lines: Sequence[str]) -> None:
    for line, found in zip(lines, tokenizer.encode_batch(lines), strict=True):
        assert found == original.encode(line, add_special_tokens=False), line


@pytest.mark.parametrize(
    ("name", "original"),
    [("bert-base-uncased", bert), ("bert-base-cased", bert), ("gpt2", gpt2), ("roberta", roberta)],
)
def test_ids_equal_the_hubs_class(
    name: str, original: Callable[[Path], Any], shared_data: Path, real_lines: list[str]
) -> None:
    directory = shared_data / "vocabularies" / name
    assert_ids_equal(load_tokenizer(directory), original(directory), [*real_lines, *nasty_lines()])


@pytest.mark.parametrize("name", ["bert-base-uncased", "bert-base-cased"])
def test_ids_equal_the_original_rules_in_python(name: str, shared_data: Path, real_lines: list[str]) -> None:
    """The class composes Unicode first, which the original code does not; texts changed by this are left out."""
    legacy = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    path = shared_data / "vocabularies" / name / "vocab.txt"
    original = legacy.BertTokenizerLegacy(str(path), do_lower_case="uncased" in name)
    lines = [line for line in [*real_lines[:SLOW_LINES], *nasty_lines()] if unicodedata.is_normalized("NFC", line)]
    assert len(lines) > SLOW_LINES
    assert_ids_equal(load_tokenizer(path), original, lines)


def test_words_of_101_to_200_characters_are_cut_where_the_hubs_class_gives_up(shared_data: Path) -> None:
    directory = shared_data / "vocabularies" / "bert-base-uncased"
    tokenizer, original = load_tokenizer(directory), bert(directory)
    for length, ours_gives_up, theirs_gives_up in ((100, False, False), (101, False, True), (201, True, True)):
        word = "x" * length
        assert (tokenizer.encode_batch([word])[0] == [tokenizer.unk_id]) == ours_gives_up
        assert (original.encode(word, add_special_tokens=False) == [tokenizer.unk_id]) == theirs_gives_up


def test_a_last_sigma_is_lower_cased_like_any_other(shared_data: Path) -> None:
    legacy = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    path = shared_data / "vocabularies" / "bert-base-uncased" / "vocab.txt"
    tokenizer, original = load_tokenizer(path), legacy.BertTokenizerLegacy(str(path))
    assert tokenizer.encode_batch(["ΟΔΟΣ"]) == tokenizer.encode_batch(["οδοσ"])
    assert original.encode("ΟΔΟΣ", add_special_tokens=False) == tokenizer.encode_batch(["οδος"])[0]
