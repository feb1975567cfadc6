"""Sentence pairs: each side is one whole sentence, the second either the next one or from another document."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from bertkit.data.layouts import AnyLayout, SegmentPair, SentencePair
from bertkit.data.shards import TokenShards
from tests.data.test_segment_pair import LENGTH, assembled, split_pairs
from tests.data.test_segment_pair_order import assert_share
from tests.data.toy_corpus import random_documents, write_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return write_shards(tmp_path_factory.mktemp("shards"), random_documents(153), shard_tokens=5000)


def sentence_of(shards: TokenShards, tokens: np.ndarray) -> int:
    """The number of the segment that consists of exactly these tokens."""
    number = int(np.searchsorted(shards.segment_start_S1, tokens[0], "right")) - 1
    assert (tokens[0], tokens[-1] + 1) == tuple(shards.segment_start_S1[number : number + 2])
    return number


def test_both_sides_are_single_whole_sentences_and_the_label_says_how_they_stand(shards: TokenShards) -> None:
    _, samples = assembled(SentencePair(), shards)
    for (first, second), label in zip(split_pairs(samples), samples.labels["next_sentence"], strict=True):
        one, other = sentence_of(shards, first), sentence_of(shards, second)
        if label:
            document = np.searchsorted(shards.document_start_D1, [one, other], "right")
            assert document[0] != document[1]
        else:
            assert other == one + 1


def test_without_random_partners_every_sentence_is_read_once(shards: TokenShards) -> None:
    _, samples = assembled(SentencePair(random_partner_probability=0.0, lone_segment="cut"), shards)
    tokens = np.concatenate([side for pair in split_pairs(samples) for side in pair])
    assert tokens.size == np.unique(tokens).size
    # The missing sentences are single and of one token: there is nothing to pair within them.
    missing = np.setdiff1d(np.arange(shards.tokens), tokens)
    assert missing.size < 10
    assert np.isin([missing, missing + 1], shards.segment_start_S1).all()


def test_half_of_the_pairs_that_could_follow_do(shards: TokenShards) -> None:
    layout = SentencePair(lone_segment="cut")
    labels = np.concatenate([assembled(layout, shards, epoch)[1].labels["next_sentence"] for epoch in range(4)])
    assert labels.size > 3000
    assert_share(labels.sum(), labels.size, 0.5)


def test_sentences_that_do_not_fit_are_cut_as_segments_are(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [[90, 5], [41, 42]] * 20)
    plan, samples = assembled(SentencePair(random_partner_probability=0.0), shards)
    assert samples.lengths_B.tolist() == [LENGTH] * 40
    sizes = list(zip(plan["first_length"].tolist(), plan["second_length"].tolist(), strict=True))
    assert sizes == [(59, 5), (32, 32)] * 20


def test_pairs_are_far_shorter_than_those_of_segments(shards: TokenShards) -> None:
    """This is why the paper uses a larger batch for them."""
    sentences, segments = (assembled(layout, shards)[1].lengths_B.mean() for layout in (SentencePair(), SegmentPair()))
    assert sentences < 0.75 * segments


def test_a_recipe_chooses_it_by_name() -> None:
    layout = TypeAdapter(AnyLayout).validate_python({"name": "sentence-pair", "random_partner_probability": 0.25})
    assert layout == SentencePair(random_partner_probability=0.25)
