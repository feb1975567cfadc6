"""Held-out text is a share of the tokens with a minimum, and the held-out part of large corpora has not changed."""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.split import range_tokens, split_documents
from tests.data.toy_corpus import random_documents, whole_documents

LEAST = DataConfig().held_out_tokens


def indices(documents: list[list[int]]) -> Any:
    """What the split reads from a corpus of documents given as the lengths of their segments."""
    lengths = [length for document in documents for length in document]
    return SimpleNamespace(
        directory=Path("toy"),
        num_documents=len(documents),
        num_segments=len(lengths),
        tokens=sum(lengths),
        document_start_D1=np.array([0, *accumulate(map(len, documents))]),
        segment_start_S1=np.array([0, *accumulate(lengths)]),
    )


def novel(paragraphs: int = 700) -> list[list[int]]:
    """Paragraphs of one to six sentences: some 40,000 tokens."""
    generator = np.random.default_rng(3)
    return [generator.integers(4, 30, generator.integers(1, 7)).tolist() for _ in range(paragraphs)]


def shares(shards: Any, *splits: np.ndarray) -> list[float]:
    return [range_tokens(shards, split) / shards.tokens for split in splits]


def segments(ranges_N2: np.ndarray) -> set[int]:
    return {number for first, end in ranges_N2.tolist() for number in range(first, end)}


def assert_a_partition(shards: Any, training: np.ndarray, held: np.ndarray) -> None:
    assert not segments(training) & segments(held)
    assert segments(training) | segments(held) == set(range(shards.num_segments))
    for part in (training, held):
        assert len(part)
        assert (part[:, 0] < part[:, 1]).all()
        assert (np.diff(part[:, 0]) > 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_one_novel_holds_out_a_tenth_of_its_tokens_in_whole_paragraphs(seed: int) -> None:
    shards = indices(novel())
    _, few = split_documents(shards, 0.01, seed)
    assert range_tokens(shards, few) < 0.03 * shards.tokens
    training, held = split_documents(shards, 0.01, seed, least_tokens=LEAST)
    assert_a_partition(shards, training, held)
    assert 0.1 <= shares(shards, held)[0] < 0.101
    documents = {tuple(each) for each in whole_documents(shards).tolist()}
    whole = [tuple(each) in documents for each in held.tolist()]
    assert sum(whole) > 0.95 * len(whole)
    assert {tuple(each) for each in few.tolist()} <= {tuple(each) for each in held.tolist()}


def test_the_floor_is_in_tokens_where_a_tenth_of_the_text_is_more() -> None:
    shards = indices(novel(4000))
    assert shards.tokens > 20 * LEAST
    _, held = split_documents(shards, 0.01, 0, least_tokens=LEAST)
    assert LEAST <= range_tokens(shards, held) < LEAST + 30


def test_a_text_without_paragraphs_holds_out_its_last_sentences() -> None:
    shards = indices([[10] * 300])
    training, held = split_documents(shards, 0.01, 0, least_tokens=LEAST)
    assert training.tolist() == [[0, 270]]
    assert held.tolist() == [[270, 300]]


@pytest.mark.parametrize("held_out", [0.01, 0.1, 0.34])
def test_each_of_few_documents_gives_its_share_of_segments_where_tokens_do_not_count(held_out: float) -> None:
    lengths = [1, 2, 3, 10, 25, 100]
    shards = indices([[5] * length for length in lengths])
    training, held = split_documents(shards, held_out, 0)
    assert_a_partition(shards, training, held)
    ends = np.cumsum(lengths)
    expected = [0 if n == 1 else max(1, math.floor(held_out * n)) for n in lengths]
    assert held.tolist() == [[end - n, end] for end, n in zip(ends.tolist(), expected, strict=True) if n]


def test_each_of_few_documents_gives_its_share() -> None:
    shards = indices([[5] * 400, [7] * 100, [3] * 800])
    training, held = split_documents(shards, 0.02, 0, least_tokens=LEAST)
    assert_a_partition(shards, training, held)
    parts = [shards.segment_start_S1[end] - shards.segment_start_S1[first] for first, end in held.tolist()]
    assert np.array(parts) / [2000, 700, 2400] == pytest.approx(0.1, abs=0.01)


def test_what_large_corpora_hold_out_is_as_it_was() -> None:
    """The rule of the first versions: the documents whose draw is at most the share."""
    shards = indices(novel(24_000))
    assert 0.01 * shards.tokens > LEAST
    uniform = Draw(7).uniform("held-out", sample=np.arange(shards.num_documents))
    documents = whole_documents(shards)
    training, held = split_documents(shards, 0.01, 7, least_tokens=LEAST)
    np.testing.assert_array_equal(held, documents[uniform <= 0.01])
    np.testing.assert_array_equal(training, documents[uniform > 0.01])


@pytest.mark.parametrize("seed", range(6))
def test_one_book_beside_many_letters_is_neither_held_out_whole_nor_left_out(seed: int) -> None:
    letters = [[6, 6] for _ in range(60)]
    shards = indices([*letters[:30], [10] * 20_000, *letters[30:]])
    training, held = split_documents(shards, 0.05, seed, least_tokens=LEAST)
    assert_a_partition(shards, training, held)
    assert 0.05 <= shares(shards, held)[0] < 0.06


@pytest.mark.parametrize("documents", [[[5], [5]], [[9, 4]], [[50]] * 60, [[1]] * 3 + [[900]], [[900]] + [[800]] * 49])
def test_whatever_can_be_split_is(documents: list[list[int]]) -> None:
    shards = indices(documents)
    training, held = split_documents(shards, 0.01, 0, least_tokens=LEAST)
    assert_a_partition(shards, training, held)
    assert range_tokens(shards, held) <= 0.5 * shards.tokens


def test_it_is_a_function_of_text_and_seed() -> None:
    shards = indices(random_documents(300))
    again = indices(random_documents(300))
    first, same, other = (
        split_documents(each, 0.01, seed, least_tokens=LEAST)[1]
        for each, seed in ((shards, 1), (again, 1), (shards, 2))
    )
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


def test_the_recipes_of_old_runs_keep_their_hash() -> None:
    assert "held_out_tokens" not in DataConfig().model_dump()
    assert DataConfig(held_out_tokens=0).model_dump()["held_out_tokens"] == 0
