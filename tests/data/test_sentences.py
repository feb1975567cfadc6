"""FULL-SENTENCES and DOC-SENTENCES: nothing is lost or repeated, and separators are between documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bertkit.data.batch import PackedBatch
from bertkit.data.layouts import (
    Address,
    Contiguous,
    DocSentences,
    FullSentences,
    PackedDocuments,
    SingleSegment,
    sentences,
)
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.data.shards import TokenShards
from tests.data.toy_corpus import CLS, FIRST_ID, SEP, random_documents, vocabulary, whole_documents, write_shards

LENGTH = 41


@pytest.fixture(scope="module", params=[20, 95])
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    """With segments that always fit, and with some that are longer than a sample."""
    documents = random_documents(83, longest=request.param)
    return write_shards(tmp_path_factory.mktemp("shards"), documents, shard_tokens=3000)


def assembled(
    layout: FullSentences | DocSentences | PackedDocuments | Contiguous, shards: TokenShards, documents: np.ndarray
) -> Samples:
    plan = layout.plan(shards, documents, LENGTH, Draw(0), 0)
    return layout.assemble(shards, plan, vocabulary(), Address(np.zeros(len(plan), int), np.arange(len(plan))))


@pytest.mark.parametrize("layout", [FullSentences(), DocSentences(), PackedDocuments()])
def test_every_token_is_read_once_and_in_order(
    layout: FullSentences | DocSentences | PackedDocuments, shards: TokenShards
) -> None:
    samples = assembled(layout, shards, whole_documents(shards))
    np.testing.assert_array_equal(samples.ids_T[~samples.special_T] - FIRST_ID, np.arange(shards.tokens))
    assert samples.lengths_B.max() <= LENGTH
    np.testing.assert_array_equal(samples.ids_T[samples.cu_seqlens_B1[:-1]], CLS)
    np.testing.assert_array_equal(samples.ids_T[samples.cu_seqlens_B1[1:] - 1], SEP)


def test_full_sentences_cross_documents_behind_a_separator(shards: TokenShards) -> None:
    samples = assembled(FullSentences(), shards, whole_documents(shards))
    document_token = shards.segment_start_S1[shards.document_start_D1]
    position_T = samples.ids_T - FIRST_ID
    inner = np.flatnonzero((position_T[:-1] >= 0) & (position_T[1:] >= 0))
    assert not np.isin(position_T[inner + 1], document_token).any()
    assert (np.bincount(samples.sequence_T, samples.ids_T == SEP) > 1).any()


def test_contiguous_samples_are_full_and_a_separator_follows_each_document_and_nothing_else(
    shards: TokenShards,
) -> None:
    documents = whole_documents(shards)
    kept = np.arange(len(documents)) % 7 != 3
    samples = assembled(Contiguous(), shards, documents[kept])
    tokens = [
        np.arange(shards.segment_start_S1[low], shards.segment_start_S1[high]) for low, high in documents[kept].tolist()
    ]
    expected = np.concatenate([part for each in tokens for part in (each + FIRST_ID, [SEP])])
    np.testing.assert_array_equal(samples.ids_T[samples.ids_T != CLS], expected)
    np.testing.assert_array_equal(samples.ids_T[samples.cu_seqlens_B1[:-1]], CLS)
    assert samples.lengths_B.max() <= LENGTH
    runs = int((np.diff(documents[kept][:, 0]) != np.diff(documents[kept][:, 1])).sum()) + 1
    assert (samples.lengths_B < LENGTH - 1 - 1).sum() <= 2 * len(documents) // 7 + runs + 1
    assert (np.sort(samples.lengths_B)[len(samples.lengths_B) // 2 :] >= LENGTH - 1).all()


def test_with_separators_of_samples_documents_just_follow(shards: TokenShards) -> None:
    documents = whole_documents(shards)
    samples = assembled(Contiguous(separators="samples"), shards, documents)
    expected = np.arange(shards.segment_start_S1[documents[0, 0]], shards.segment_start_S1[documents[-1, 1]]) + FIRST_ID
    np.testing.assert_array_equal(samples.ids_T[~samples.special_T], expected)
    np.testing.assert_array_equal(samples.ids_T[samples.cu_seqlens_B1[:-1]], CLS)
    np.testing.assert_array_equal(samples.ids_T[samples.cu_seqlens_B1[1:] - 1], SEP)
    assert samples.special_T.sum() == 2 * len(samples.lengths_B)
    assert sorted(set(samples.lengths_B.tolist()))[1:] in ([], [LENGTH])
    assert "separators" not in Contiguous().model_dump()


def test_doc_sentences_stay_within_a_document(shards: TokenShards) -> None:
    samples = assembled(DocSentences(), shards, whole_documents(shards))
    np.testing.assert_array_equal(np.bincount(samples.sequence_T, samples.ids_T == SEP), 1)


def test_no_sample_reaches_over_a_document_left_out(shards: TokenShards) -> None:
    documents = whole_documents(shards)
    kept = np.arange(len(documents)) % 5 != 2
    samples = assembled(FullSentences(), shards, documents[kept])
    left_out = np.concatenate(
        [np.arange(shards.segment_start_S1[low], shards.segment_start_S1[high]) for low, high in documents[~kept]]
    )
    positions = samples.ids_T[~samples.special_T] - FIRST_ID
    assert not np.isin(positions, left_out).any()
    assert positions.size == shards.tokens - left_out.size
    ends = samples.cu_seqlens_B1[1:]
    for start, end in zip(samples.cu_seqlens_B1[:-1], ends, strict=True):
        run = samples.ids_T[start:end][~samples.special_T[start:end]]
        np.testing.assert_array_equal(run, np.arange(run[0], run[0] + run.size))


def test_a_run_stops_only_where_the_next_segment_has_no_room(shards: TokenShards) -> None:
    plan = DocSentences().plan(shards, whole_documents(shards), LENGTH, Draw(0), 0)
    starts = shards.segment_start_S1
    document_token = starts[shards.document_start_D1]
    for start, end in plan.tolist():
        if start in starts and end in starts and end not in document_token:
            next_end = starts[np.searchsorted(starts, end) + 1]
            assert next_end - start > LENGTH - 2


def plain_ranges(shards: TokenShards, room: int, *, packed: bool) -> list[tuple[int, int]]:
    """The greedy rule, a segment at a time: a further document costs two tokens if it is a sequence of its own, else
    one, which a range that ends with a document needs as well."""
    edges = shards.segment_start_S1.tolist()
    documents = whole_documents(shards).tolist()
    owner = [number for number, (low, high) in enumerate(documents) for _ in range(low, high)]
    ranges, segment = [], 0
    while segment < len(owner):
        end = segment
        while end < len(owner):
            last = owner[end] if packed else owner[min(end + 1, len(owner) - 1)]
            if edges[end + 1] - edges[segment] + (2 if packed else 1) * (last - owner[segment]) > room:
                break
            end += 1
        if end == segment:
            first, end = edges[segment], segment + 1
            ranges += [(left, min(left + room, edges[end])) for left in range(first, edges[end], room)]
        else:
            ranges.append((edges[segment], edges[end]))
        segment = end
    return ranges


@pytest.mark.parametrize("layout", [FullSentences(), PackedDocuments()])
@pytest.mark.parametrize("window", [1, 1 << 20])
@pytest.mark.parametrize("length", [7, 12, 40])
def test_ranges_are_those_of_the_plain_rule_whatever_is_in_memory_together(
    layout: FullSentences | PackedDocuments,
    window: int,
    length: int,
    shards: TokenShards,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sentences, "_WINDOW", window)
    plan = layout.plan(shards, whole_documents(shards), length, Draw(0), 0)
    assert plan.tolist() == plain_ranges(shards, length - 2, packed=isinstance(layout, PackedDocuments))


def test_packed_documents_fill_samples_with_sequences_of_one_document_each(shards: TokenShards) -> None:
    documents = whole_documents(shards)
    document_token = shards.segment_start_S1[shards.document_start_D1]
    plan = PackedDocuments().plan(shards, documents, LENGTH, Draw(0), 0)
    samples = assembled(PackedDocuments(), shards, documents)
    first_token = samples.ids_T[samples.cu_seqlens_B1[:-1] + 1] - FIRST_ID
    last_token = samples.ids_T[samples.cu_seqlens_B1[1:] - 2] - FIRST_ID
    document_of = np.searchsorted(document_token, np.stack([first_token, last_token]), side="right")
    np.testing.assert_array_equal(document_of[0], document_of[1])
    # A sample's sequences use its tokens, including special ones, and the next sentence would not have fitted.
    row_of = np.searchsorted(plan["start"], first_token, side="right") - 1
    filled = np.bincount(row_of, samples.lengths_B, minlength=len(plan))
    assert filled.max() <= LENGTH
    assert (np.bincount(row_of) > 1).any()
    starts = shards.segment_start_S1
    for row in range(len(plan) - 1):
        end = int(plan["end"][row])
        if int(plan["start"][row]) in starts and end in starts:
            next_tokens = int(starts[np.searchsorted(starts, end) + 1]) - end
            more = next_tokens + (2 if end in document_token else 0)
            assert filled[row] + more > LENGTH
    # Each has its own draws, although several share a sample.
    assert len({(epoch, sample) for epoch, sample in zip(samples.epoch_B, samples.sample_B, strict=True)}) == len(
        samples.lengths_B
    )
    np.testing.assert_array_equal(samples.sample_B & ((1 << 50) - 1), row_of)
    batch = PackedBatch.from_samples(samples)
    assert batch.sequences.num_sequences == len(first_token)
    assert all(batch.positions_T[start] == 0 for start in samples.cu_seqlens_B1[:-1])


def released_chunks(lengths: list[int], target: int) -> list[tuple[int, int]]:
    """create_instances_from_document_no_nsp: (first token, token after the last) of each chunk, before truncation."""
    chunks, current, begin, place = [], 0, 0, 0
    for number, length in enumerate(lengths):
        current += length
        place += length
        if number == len(lengths) - 1 or current >= target:
            chunks.append((begin, place))
            begin, current = place, 0
    return chunks


@pytest.mark.parametrize("probability", [0.0, 0.1, 1.0])
def test_single_segments_are_the_released_chunks_cut_front_or_back(shards: TokenShards, probability: float) -> None:
    documents, room, draw = whole_documents(shards), LENGTH - 2, Draw(4)
    fronts: list[float] = []
    for epoch in range(3):
        plan = SingleSegment(short_sequence_probability=probability).plan(shards, documents, LENGTH, draw, epoch)
        rows = iter(plan.tolist())
        for number, (low, high) in enumerate(documents.tolist()):
            is_short = float(draw.uniform("single/short", epoch=epoch, sample=number)) < probability
            drawn = 2 + int(draw.integers("single/target", room - 1, epoch=epoch, sample=number))
            starts = shards.segment_start_S1[low : high + 1]
            for begin, end in released_chunks(np.diff(starts).tolist(), drawn if is_short else room):
                start, stop = next(rows)
                first, last = begin + int(starts[0]), end + int(starts[0])
                assert first <= start < stop <= last
                assert stop - start == min(room, last - first)
                if last - first > room:
                    fronts.append((start - first) / (last - first - room))
        assert next(rows, None) is None
    if probability == 0.0:
        assert np.mean(fronts) == pytest.approx(0.5, abs=0.05)
        assert 0 < np.mean([front in (0.0, 1.0) for front in fronts]) < 0.8


def test_a_tenth_of_the_documents_aims_at_shorter_segments(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [[3] * 40 for _ in range(1500)])
    plan = SingleSegment().plan(shards, whole_documents(shards), LENGTH, Draw(5), 0)
    lengths = (plan["end"] - plan["start"]).astype(int)
    document = plan["start"].astype(int) // 120
    longest = np.array([lengths[document == number].max() for number in range(1500)])
    # Of the 38 target lengths from 2 to 39, those up to 36 are reached by whole sentences below 39 tokens.
    short = longest < LENGTH - 2
    expected = 0.1 * 35 / 38
    assert short.mean() == pytest.approx(expected, abs=3 * np.sqrt(expected / 1500))


def test_epochs_differ_and_static_copies_come_back(shards: TokenShards) -> None:
    documents = whole_documents(shards)
    first, second, again = (SingleSegment().plan(shards, documents, LENGTH, Draw(5), epoch) for epoch in (0, 1, 0))
    np.testing.assert_array_equal(first, again)
    assert len(first) != len(second) or not np.array_equal(first, second)
