"""Plans in parts: rows and bytes do not depend on where parts end. What layouts look up agrees with plain indices."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from bertkit.arrays import save_rows
from bertkit.data.lanes import LanePart, RunningText
from bertkit.data.layouts import (
    Contiguous,
    DocSentences,
    FullSentences,
    PackedDocuments,
    SegmentPair,
    SentencePair,
    SingleSegment,
    chunks,
    pairs,
    sentences,
)
from bertkit.data.random import Draw
from bertkit.data.shards import TokenShards
from bertkit.data.stream import SampleSpec, SampleStream
from bertkit.errors import DataError
from tests.data.toy_corpus import SEP, random_documents, whole_documents, write_shards

LENGTH = 41


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return write_shards(tmp_path_factory.mktemp("shards"), random_documents(61, longest=50), shard_tokens=3000)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize(
    "layout",
    [
        SegmentPair(),
        SegmentPair(random_partner_probability=0.2, swap_probability=0.5, lone_segment="cut"),
        SentencePair(),
        SingleSegment(),
        DocSentences(),
        FullSentences(),
        PackedDocuments(),
        Contiguous(),
    ],
    ids=lambda layout: layout.choice,
)
def test_parts_of_any_length_are_the_same_plan(
    layout: SegmentPair, rows: int, shards: TokenShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = whole_documents(shards)[np.arange(61) % 10 != 3]
    whole = layout.plan(shards, documents, LENGTH, Draw(5), 1)
    spec = SampleSpec(5, "", layout, LENGTH, None)
    stored = SampleStream(spec, shards, documents, tmp_path).plan(1)
    (file,) = tmp_path.rglob("*.npy")
    at_once = file.read_bytes()
    file.unlink()
    for module in (pairs, sentences, chunks):
        monkeypatch.setattr(module, "PART_ROWS", rows)
    parts = list(layout.plan_parts(shards, documents, LENGTH, Draw(5), 1))
    assert len(parts) > 3
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(stored, whole)
    np.testing.assert_array_equal(SampleStream(spec, shards, documents, tmp_path).plan(1), whole)
    assert file.read_bytes() == at_once


@pytest.mark.parametrize("shape", [(0,), (9,), (123_456,), (77, 3)])
def test_rows_written_in_parts_are_the_bytes_of_numpys_save(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype="<u4").reshape(shape)
    expected, found = BytesIO(), BytesIO()
    np.save(expected, array)
    assert save_rows(found, [array[:5], array[5:6], array[6:]]) == len(array)
    assert found.getvalue() == expected.getvalue()


def test_a_plan_without_samples_leaves_no_file(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", [[1]])
    stream = SampleStream(
        SampleSpec(0, "", SegmentPair(random_partner_probability=0.0, lone_segment="cut"), LENGTH, None),
        shards,
        whole_documents(shards),
        tmp_path / "plans",
    )
    with pytest.raises(DataError, match="too few for a sample"):
        stream.plan(0)
    assert {each.suffix for each in (tmp_path / "plans").rglob("*") if each.is_file()} == {".lock"}


def test_a_token_is_found_in_its_document(shards: TokenShards) -> None:
    start_D1 = shards.segment_start_S1[shards.document_start_D1]
    token_N = np.arange(shards.tokens)
    np.testing.assert_array_equal(shards.documents_of(token_N), np.searchsorted(start_D1, token_N, side="right") - 1)
    for start, end in np.sort(np.random.default_rng(0).integers(0, shards.tokens + 2, (300, 2)), axis=1).tolist():
        expected = start_D1[(start_D1 >= start) & (start_D1 < end)]
        np.testing.assert_array_equal(shards.document_starts(start, end), expected)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_boundaries_of_a_lane_are_those_of_the_whole_text(shards: TokenShards, is_reversed: bool) -> None:
    documents = np.random.default_rng(0).permutation(whole_documents(shards))[:40]
    text = RunningText(shards, documents, SEP)
    places, offset = [], 0
    for low, high in documents.tolist():
        start_s1 = shards.segment_start_S1[low : high + 1]
        places += (offset + start_s1[:-1] - start_s1[0]).tolist()  # a separator belongs to the last segment
        offset += int(start_s1[-1] - start_s1[0]) + 1
    beginnings = np.array([*places, offset])
    assert text.size == offset
    lane = LanePart(text, offset // 3, offset - 5, is_reversed)
    own = np.sort(lane.high - beginnings if is_reversed else beginnings - lane.low)
    for place in range(lane.size + 1):
        assert lane.boundary_before(place) == max(0, own[own <= place].max())
        assert lane.boundary_from(place) == min(lane.size, own[own >= place].min())
        end = min(lane.size, place + 1 + place % 70)
        np.testing.assert_array_equal(lane.boundaries(place, end), own[(own >= place) & (own < end)])
