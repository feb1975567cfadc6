"""Lanes: every sequence continues the one at its place in the previous step, in both directions, for any documents."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from bertkit.data.batch import PackedBatch
from bertkit.data.lanes import LanePart, LaneStream, RunningText
from bertkit.data.layouts import ContinuousText, LaneLayout, ReusedSegments
from bertkit.data.samples import Samples
from bertkit.data.shards import TokenShards
from bertkit.data.stream import SampleSpec, StepBatches
from bertkit.errors import DataError
from bertkit.objectives.permutation_lm import PermutationLM
from tests.data.toy_corpus import CLS, FIRST_ID, SEP, random_documents, vocabulary, whole_documents, write_shards

LENGTH = 23


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return write_shards(tmp_path_factory.mktemp("shards"), random_documents(25), shard_tokens=700)


def stream_of(
    shards: TokenShards, layout: LaneLayout, lanes: int, *, every: int = 1, length: int = LENGTH
) -> LaneStream:
    """A stream that leaves out every n-th document, as held-out text leaves gaps."""
    documents = whole_documents(shards)
    kept = documents if every == 1 else documents[np.arange(len(documents)) % every != 0]
    return LaneStream(SampleSpec(3, "train/0", layout, length, None), shards, kept, lanes, SEP)


def expected_text(stream: LaneStream, epoch: int) -> list[int]:
    """The epoch's documents in order, each followed by a separator, from a plain loop."""
    shards = stream.shards
    uniform_N = stream.spec.draw.uniform("lanes/documents", epoch=epoch, sample=np.arange(len(stream.documents_N2)))
    text: list[int] = []
    for number in np.argsort(uniform_N, kind="stable").tolist():
        low, high = stream.documents_N2[number].tolist()
        first, end = (int(shards.segment_start_S1[place]) for place in (low, high))
        text += [*shards.tokens_between(first, end).tolist(), SEP]
    return text


def by_sequence(samples: Samples) -> list[np.ndarray]:
    return np.split(samples.ids_T, samples.cu_seqlens_B1[1:-1])


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_lane_is_the_text_from_end_to_end(shards: TokenShards, bidirectional: bool, every: int) -> None:
    stream = stream_of(shards, ContinuousText(bidirectional=bidirectional), 6, every=every)
    for epoch in (0, 1):
        text = expected_text(stream, epoch)
        texts = 3 if bidirectional else 6
        size = len(text) // texts
        for lane in range(6):
            steps = stream.epoch_steps
            first = epoch * stream.epoch_length(0) + lane
            read = [stream.samples(first + 6 * step, 1, vocabulary()) for step in range(steps)]
            part = lane % texts
            expected = text[part * size : (part + 1) * size]
            expected = expected[::-1] if lane >= texts else expected
            np.testing.assert_array_equal(np.concatenate([each.ids_T for each in read]), expected[: steps * LENGTH])
            lanes = [each.lanes for each in read]
            assert all(each is not None for each in lanes)
            following = [int(each.following_B[0]) for each in lanes if each is not None]
            assert following == [expected[(step + 1) * LENGTH] for step in range(steps)]
            assert {bool(each.reversed_B[0]) for each in lanes if each is not None} == {lane >= texts}
    assert expected_text(stream, 0) != expected_text(stream, 1)


def test_what_is_left_of_a_lane_is_less_than_a_step(shards: TokenShards) -> None:
    stream = stream_of(shards, ContinuousText(), 5)
    left = stream.text_size // 5 - stream.epoch_steps * LENGTH
    assert 1 <= left <= LENGTH


def test_a_batch_is_a_function_of_its_step(shards: TokenShards) -> None:
    stream = stream_of(shards, ReusedSegments(), 6)
    again = pickle.loads(pickle.dumps(stream))
    for step in (0, 3, stream.epoch_steps + 1):
        ones = [stream.samples(6 * step + lane, 1, vocabulary()).ids_T for lane in range(6)]
        np.testing.assert_array_equal(again.samples(6 * step, 6, vocabulary()).ids_T, np.concatenate(ones))


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("reused", [None, 7])
def test_segments_behind_the_reused_tokens(shards: TokenShards, reused: int | None, every: int) -> None:
    """The first part continues where the previous first part ended, followed by A; B either follows A in the text or
    does not."""
    stream = stream_of(shards, ReusedSegments(reused_tokens=reused), 6, every=every, length=44)
    advance = 22 if reused is None else reused
    text = expected_text(stream, 0)
    size = len(text) // 3
    follows = 0
    for step in range(stream.epoch_steps):
        samples = stream.samples(6 * step, 6, vocabulary())
        assert samples.lanes is not None
        assert samples.lanes.reused_tokens == advance
        np.testing.assert_array_equal(samples.lengths_B, 44)
        for lane, ids in enumerate(by_sequence(samples)):
            own = text[lane % 3 * size : (lane % 3 + 1) * size]
            own = own[::-1] if lane >= 3 else own
            types = samples.token_types_T[44 * lane : 44 * (lane + 1)]
            source = samples.source_T
            assert source is not None
            source = source[44 * lane : 44 * (lane + 1)]
            assert (np.diff(types) >= 0).all()
            assert ids[-1] == CLS
            assert types[-1] == 2
            assert (types == 2).sum() == 1
            first, second = np.flatnonzero(types == 0), np.flatnonzero(types == 1)
            assert ids[first[-1]] == SEP == ids[second[-1]]
            end_of_a = step * advance + first.size - 1
            np.testing.assert_array_equal(ids[first[:-1]], own[step * advance : end_of_a])
            assert first.size > advance + 1
            assert second.size >= 2
            stretch = own[end_of_a : end_of_a + second.size - 1]
            follows += np.array_equal(ids[second[:-1]], stretch)
            inside = source >= 0
            np.testing.assert_array_equal(ids[inside] - FIRST_ID, source[inside])
            np.testing.assert_array_equal(inside, ~samples.special_T[44 * lane : 44 * (lane + 1)])
    assert 0.1 < follows / stream.epoch_length(0) < 0.6


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_partners_are_random_as_often_as_asked(shards: TokenShards, probability: float) -> None:
    """A segment is cut at the end of a sentence; only a sentence that fills the available room always has a random
    partner."""
    layout = ReusedSegments(bidirectional=False, random_partner_probability=probability)
    stream = stream_of(shards, layout, 4, length=140)
    text = expected_text(stream, 0)
    place = {token: number for number, token in enumerate(text)}
    samples = stream.samples(0, stream.epoch_length(0), vocabulary())
    follows = []
    for first in range(0, samples.ids_T.size, 140):
        ids, types = (each[first : first + 140] for each in (samples.ids_T, samples.token_types_T))
        last, behind = ids[types == 0][-2], ids[types == 1][0]
        if SEP not in (last, behind):
            # If A was cut, its sentence continues and B begins with the next one.
            follows.append(0 < place[behind] - place[last] <= 140)
    assert len(follows) > 20
    assert abs(np.mean(follows) - (1 - probability)) < 0.15  # a random position may be the next one


def test_boundaries_of_a_lane_are_where_sentences_begin(shards: TokenShards) -> None:
    text = RunningText(shards, whole_documents(shards), SEP)
    begins = {0, text.size}
    place = 0
    for low, high in text.documents_N2.tolist():
        for segment in range(low, high):
            begins.add(place)
            place += int(shards.segment_start_S1[segment + 1] - shards.segment_start_S1[segment])
        place += 1  # the separator, which belongs to the document's last sentence
    low, high = 311, 977
    for is_reversed in (False, True):
        lane = LanePart(text, low, high, is_reversed)
        own = sorted(high - each if is_reversed else each - low for each in begins)
        inside = [each for each in own if 0 <= each < lane.size]
        assert lane.boundaries(0, lane.size).tolist() == inside
        assert lane.boundaries(40, 90).tolist() == [each for each in inside if 40 <= each < 90]
        for number in (0, 1, 50, 333, lane.size - 1):
            assert lane.boundary_before(number) == max([0, *(each for each in own if each <= number)])
            assert lane.boundary_from(number) == min([lane.size, *(each for each in own if each >= number)])


def test_a_part_of_a_batch_has_each_lane_once(shards: TokenShards) -> None:
    stream = stream_of(shards, ContinuousText(), 4)
    samples = stream.samples(0, 10, vocabulary())
    numbers = []
    for part in samples.split(None):
        assert part.lanes is not None
        numbers.append(part.lanes.number_B.tolist())
    assert numbers == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]
    parts = list(samples.split(3 * LENGTH))
    sizes = [part.lengths_B.size for part in parts]
    assert sizes == [3, 1, 3, 1, 2]
    np.testing.assert_array_equal(np.concatenate([part.ids_T for part in parts]), samples.ids_T)


def test_a_batch_knows_its_lanes(shards: TokenShards) -> None:
    stream = stream_of(shards, ReusedSegments(), 4)
    batches = StepBatches(stream, vocabulary(), [PermutationLM()], batch_sequences=4, micro_batch_tokens=3 * LENGTH)
    first, second = batches[2]
    assert isinstance(first, PackedBatch)
    assert first.lanes is not None
    assert second.lanes is not None
    assert first.lanes.number_B.tolist() == [0, 1, 2]
    assert second.lanes.number_B.tolist() == [3]
    assert first.lanes.reversed_B.tolist() == [False, False, True]
    assert first.ranks_T2 is not None
    assert first.ranks_T2.shape == (3 * LENGTH, 2)


def test_a_text_that_is_too_short_says_how_many_sequences_it_makes(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "short", [[9, 8], [30]])
    stream = stream_of(shards, ContinuousText(), 4)
    with pytest.raises(DataError, match=r"4 continuous sequences .* needs 96 tokens, but the text has 49; .*=2"):
        stream.epoch_length(0)
    assert stream_of(shards, ContinuousText(), 2).epoch_length(0) == 2


def test_held_out_lanes_are_fewer_where_the_text_is_short(shards: TokenShards) -> None:
    spec = SampleSpec(3, "held-out/0", ReusedSegments(), LENGTH, 1)
    documents = whole_documents(shards)[:3]
    stream = LaneStream.of_held_out(spec, shards, documents, 64, SEP)
    assert stream.lanes < 64
    assert stream.lanes % 2 == 0
    assert stream.epoch_steps >= 4
