"""Pairs in order, swapped and random: their labels, their shares, and the treatment of a single segment."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from bertkit.data.layouts import SegmentPair, SentencePair
from bertkit.data.layouts.pairs import PairLayout, Relation
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.data.shards import TokenShards
from tests.data.test_segment_pair import LENGTH, assembled, split_pairs
from tests.data.toy_corpus import random_documents, whole_documents, write_shards

ORDER = SegmentPair(random_partner_probability=0.0, swap_probability=0.5, lone_segment="cut")
STRUCTURE = SegmentPair(random_partner_probability=1 / 3, swap_probability=0.5, lone_segment="cut")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return write_shards(tmp_path_factory.mktemp("shards"), random_documents(153), shard_tokens=5000)


def documents_of(shards: TokenShards, tokens: np.ndarray) -> np.ndarray:
    return np.searchsorted(shards.segment_start_S1[shards.document_start_D1], tokens, "right")


def found_relations(samples: Samples, shards: TokenShards) -> list[Relation]:
    """The actual relation of each pair's second segment to the first, from the origin of their tokens."""
    found = []
    for first, second in split_pairs(samples):
        document = documents_of(shards, np.array([first[0], second[0]]))
        if document[0] != document[1]:
            found.append(Relation.RANDOM)
        else:
            assert first[-1] < second[0] or second[-1] < first[0]
            found.append(Relation.NEXT if first[-1] < second[0] else Relation.PREVIOUS)
    return found


def assert_share(count: int, total: int, expected: float) -> None:
    assert abs(count / total - expected) < 4 * np.sqrt(expected * (1 - expected) / total)


def test_berts_pairs_are_those_that_they_were_before_there_were_swaps(shards: TokenShards) -> None:
    """The draws for swaps follow all others, so a BERT run reads the same bytes as before."""
    digest = hashlib.sha256()
    for epoch in (0, 3):
        _, samples = assembled(SegmentPair(), shards, epoch)
        labels = samples.labels["next_sentence"]
        for array in (samples.ids_T, samples.token_types_T, samples.special_T, samples.cu_seqlens_B1, labels):
            digest.update(np.ascontiguousarray(array).tobytes())
    assert digest.hexdigest() == "e6bedbe3eb93d9d68dd44d35c2cafe3e11b6a9311db4d67d2b649bc7a7dfb279"


@pytest.mark.parametrize("layout", [ORDER, STRUCTURE, SegmentPair(), SentencePair(swap_probability=0.3)])
def test_every_label_says_where_the_second_segment_comes_from(layout: PairLayout, shards: TokenShards) -> None:
    _, samples = assembled(layout, shards)
    found = np.array(found_relations(samples, shards))
    np.testing.assert_array_equal(samples.labels["sentence_structure"], found)
    for binary in ("next_sentence", "sentence_order"):
        np.testing.assert_array_equal(samples.labels[binary], found != Relation.NEXT)


def test_orders_are_balanced_and_no_partner_is_foreign(shards: TokenShards) -> None:
    labels = np.concatenate([assembled(ORDER, shards, epoch)[1].labels["sentence_structure"] for epoch in range(12)])
    assert set(labels) == {Relation.NEXT, Relation.PREVIOUS}
    assert labels.size > 5000
    assert_share((labels == Relation.PREVIOUS).sum(), labels.size, 0.5)


def test_the_three_relations_have_a_third_each(shards: TokenShards) -> None:
    labels = np.concatenate([assembled(STRUCTURE, shards, epoch)[1].labels["sentence_structure"] for epoch in range(9)])
    for relation in Relation:
        assert_share((labels == relation).sum(), labels.size, STRUCTURE.shares[relation])
        assert STRUCTURE.shares[relation] == pytest.approx(1 / 3)


def test_a_swap_exchanges_the_two_segments_and_nothing_else(tmp_path: Path) -> None:
    """Segments of one token fill a sample exactly, so nothing is truncated."""
    shards = write_shards(tmp_path, [[1] * length for length in (130, 7, 66, 93)])
    options = {"random_partner_probability": 0.0, "short_sequence_probability": 0.0, "lone_segment": "cut"}
    straight, swapped = (
        SegmentPair(**options, swap_probability=swap).plan(shards, whole_documents(shards), LENGTH, Draw(5), 0)
        for swap in (0.0, 1.0)
    )
    assert len(straight) == 8  # four pairs of 64 tokens, and the rest of each document
    for side, other in (("first", "second"), ("second", "first")):
        for column in ("start", "length"):
            np.testing.assert_array_equal(straight[f"{side}_{column}"], swapped[f"{other}_{column}"])


def test_a_swapped_pair_is_cut_by_its_place_in_the_sample(tmp_path: Path) -> None:
    """The longer side is truncated in either position."""
    shards = write_shards(tmp_path, [[42, 41], [5, 90]] * 20)
    layout = SegmentPair(random_partner_probability=0.0, short_sequence_probability=0.0, swap_probability=1.0)
    plan = layout.plan(shards, whole_documents(shards), LENGTH, Draw(5), 0)
    sizes = list(zip(plan["first_length"].tolist(), plan["second_length"].tolist(), strict=True))
    assert sizes == [(32, 32), (59, 5)] * 20
    assert plan["swapped"].all()
    assert np.all(plan["second_start"] < plan["first_start"])


def test_by_the_released_rule_a_single_segment_has_a_random_partner(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [[9]] * 40)
    layout = SegmentPair(random_partner_probability=0.0, swap_probability=0.5)
    _, samples = assembled(layout, shards)
    assert samples.labels["sentence_structure"].tolist() == [Relation.RANDOM] * 40


def test_a_single_segment_is_cut_into_two_consecutive_ones(tmp_path: Path) -> None:
    """At any token; a single token cannot be cut and forms no pair."""
    shards = write_shards(tmp_path, [[9], [1], [200]] * 60)
    plan, samples = assembled(ORDER, shards)
    assert len(plan) == 120
    relations = found_relations(samples, shards)
    lengths = {length: set() for length in range(1, 9)}
    for (first, second), relation in zip(split_pairs(samples), relations, strict=True):
        earlier, later = (first, second) if relation is Relation.NEXT else (second, first)
        document = documents_of(shards, np.array([earlier[0], later[-1]]))
        assert document[0] == document[1]
        if earlier.size + later.size == 9:
            np.testing.assert_array_equal(np.concatenate([earlier, later]), np.arange(earlier[0], earlier[0] + 9))
            lengths[earlier.size].add(relation)
    assert all(lengths.values())


def test_without_random_partners_the_pairs_tile_the_text(tmp_path: Path) -> None:
    """In any order, if they fill a sample exactly and nothing is truncated."""
    shards = write_shards(tmp_path, [[1] * length for length in (130, 7, 66, 93)])
    _, samples = assembled(ORDER, shards)
    tokens = np.concatenate([segment for pair in split_pairs(samples) for segment in pair])
    np.testing.assert_array_equal(np.sort(tokens), np.arange(shards.tokens))
