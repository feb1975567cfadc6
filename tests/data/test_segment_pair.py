"""Segment pairs: the rules of the released code, and its statistics on generated and real text."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from bertkit.data.layouts import Address, SegmentPair
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.data.shards import TokenShards
from tests.data.toy_corpus import CLS, FIRST_ID, SEP, random_documents, vocabulary, whole_documents, write_shards

LENGTH = 67


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return write_shards(tmp_path_factory.mktemp("shards"), random_documents(153), shard_tokens=5000)


def assembled(layout: SegmentPair, shards: TokenShards, epoch: int = 0) -> tuple[np.ndarray, Samples]:
    plan = layout.plan(shards, whole_documents(shards), LENGTH, Draw(5), epoch)
    address = Address(np.full(len(plan), epoch), np.arange(len(plan)))
    return plan, layout.assemble(shards, plan, vocabulary(), address)


def split_pairs(samples: Samples) -> list[tuple[np.ndarray, np.ndarray]]:
    """The two segments of each sample as positions in the corpus, after checking the special tokens around them."""
    pairs = []
    for start, end in zip(samples.cu_seqlens_B1[:-1], samples.cu_seqlens_B1[1:], strict=True):
        ids = samples.ids_T[start:end]
        assert ids[0] == CLS
        first_separator, last = np.flatnonzero(ids == SEP)
        assert last == ids.size - 1
        types = samples.token_types_T[start:end]
        assert not types[: first_separator + 1].any()
        assert types[first_separator + 1 :].all()
        pairs.append((ids[1:first_separator] - FIRST_ID, ids[first_separator + 1 : -1] - FIRST_ID))
    return pairs


def test_each_segment_is_an_unbroken_run_of_one_document(shards: TokenShards) -> None:
    _, samples = assembled(SegmentPair(), shards)
    document_token = shards.segment_start_S1[shards.document_start_D1]
    for first, second in split_pairs(samples):
        for run in (first, second):
            np.testing.assert_array_equal(run, np.arange(run[0], run[0] + run.size))
            assert np.searchsorted(document_token, run[0], "right") == np.searchsorted(document_token, run[-1], "right")


def test_the_label_says_whether_the_second_segment_follows(shards: TokenShards) -> None:
    plan, samples = assembled(SegmentPair(), shards)
    segment_start = shards.segment_start_S1
    document_token = segment_start[shards.document_start_D1]
    random_B = samples.labels["next_sentence"]
    for (first, second), is_random in zip(split_pairs(samples), random_B, strict=True):
        document = np.searchsorted(document_token, [first[0], second[0]], "right")
        if is_random:
            assert document[0] != document[1]
        else:
            assert document[0] == document[1]
            # The tokens that truncation removed between the two are inside the segments around one boundary.
            assert np.any((segment_start > first[-1]) & (segment_start <= second[0]))
    assert len(plan) == len(random_B)


def test_no_pair_is_longer_than_asked_and_most_are_full(shards: TokenShards) -> None:
    _, samples = assembled(SegmentPair(short_sequence_probability=0.0), shards)
    assert samples.lengths_B.max() == LENGTH
    assert (samples.lengths_B == LENGTH).mean() > 0.5
    assert samples.special_T.sum() == 3 * len(samples.lengths_B)


def test_without_random_partners_every_token_is_read_once_unless_cut(shards: TokenShards) -> None:
    """Negatives return their unused segments; without negatives, chunks tile each document of several segments."""
    layout = SegmentPair(random_partner_probability=0.0, short_sequence_probability=0.0)
    plan, samples = assembled(layout, shards)
    following = plan["random"] == 0
    starts = plan["first_start"][following]
    assert np.all(np.diff(starts.astype(np.int64)) > 0)
    seen = np.zeros(shards.tokens, dtype=np.int64)
    for (first, second), is_random in zip(split_pairs(samples), plan["random"], strict=True):
        seen[first] += 1
        if not is_random:
            seen[second] += 1
    assert seen.max() == 1


def released_random_share(documents: list[list[int]], passes: int) -> float:
    """Only the counts of create_instances_from_document in BERT's script: the share of pairs with a random partner."""
    generator, pairs, foreign = Random(3), 0, 0
    for _ in range(passes):
        for lengths in documents:
            target = LENGTH - 3
            if generator.random() < 0.1:
                target = generator.randint(2, target)
            chunk: list[int] = []
            number = 0
            while number < len(lengths):
                chunk.append(lengths[number])
                if number == len(lengths) - 1 or sum(chunk) >= target:
                    first = generator.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
                    pairs += 1
                    if len(chunk) == 1 or generator.random() < 0.5:
                        foreign += 1
                        number -= len(chunk) - first
                    chunk = []
                number += 1
    return foreign / pairs


def test_random_partners_are_as_many_as_by_the_released_procedure(shards: TokenShards) -> None:
    """More than half, since a lone segment always has a random partner: the share from a walk through the same
    documents."""
    starts = shards.segment_start_S1
    documents = [np.diff(starts[low : high + 1]).tolist() for low, high in whole_documents(shards)]
    expected = released_random_share(documents, passes=60)
    plans = [assembled(SegmentPair(), shards, epoch)[0]["random"] for epoch in range(30)]
    found, pairs = np.mean(np.concatenate(plans)), sum(map(len, plans))
    assert expected > 0.55
    assert found == pytest.approx(expected, abs=4 * np.sqrt(0.25 / pairs))
    without = SegmentPair(lone_segment="cut")
    half = np.concatenate([assembled(without, shards, epoch)[0]["random"] for epoch in range(30)])
    assert np.mean(half) == pytest.approx(0.5, abs=4 * np.sqrt(0.25 / half.size))


def test_a_tenth_of_the_documents_aims_shorter(tmp_path: Path) -> None:
    documents = [[7] * 40 for _ in range(600)]
    shards = write_shards(tmp_path, documents)
    layout = SegmentPair(random_partner_probability=0.0)
    plan = layout.plan(shards, whole_documents(shards), LENGTH, Draw(5), 0)
    document = plan["first_start"] // 280
    length = plan["first_length"].astype(int) + plan["second_length"]
    short = [length[document == number].max() < LENGTH - 3 for number in range(600)]
    assert 0.07 < np.mean(short) < 0.13


def test_truncation_takes_from_the_longer_side_front_or_back(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [[5, 90], [60, 23], [41, 42]] * 300)
    layout = SegmentPair(random_partner_probability=0.0, short_sequence_probability=0.0)
    plan = layout.plan(shards, whole_documents(shards), LENGTH, Draw(5), 0)
    plan = plan[plan["random"] == 0]
    document = np.searchsorted(shards.segment_start_S1[shards.document_start_D1], plan["first_start"], "right") - 1
    sizes = {kind: set() for kind in range(3)}
    fronts: list[int] = []
    for row, number in zip(plan, document, strict=True):
        sizes[number % 3].add((int(row["first_length"]), int(row["second_length"])))
        if number % 3 == 0:
            fronts.append(int(row["second_start"]) - int(shards.segment_start_S1[2 * number + 1]))
    assert sizes == {0: {(5, 59)}, 1: {(41, 23)}, 2: {(32, 32)}}
    cut = 90 - 59
    assert abs(np.mean(fronts) - cut / 2) < 4 * np.sqrt(cut / 4 / len(fronts))


def test_a_plan_depends_on_the_epoch_and_the_seed_alone(shards: TokenShards) -> None:
    layout, documents = SegmentPair(), whole_documents(shards)
    plans = [
        layout.plan(shards, documents, LENGTH, Draw(seed), epoch) for seed, epoch in ((5, 0), (5, 0), (5, 1), (6, 0))
    ]
    np.testing.assert_array_equal(plans[0], plans[1])
    assert not np.array_equal(plans[0][:50], plans[2][:50])
    assert not np.array_equal(plans[0][:50], plans[3][:50])
