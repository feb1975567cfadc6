"""Repeated documents are found whatever their lengths and however the text is read, and are in neither part of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.data import duplicates
from bertkit.data.config import DataConfig
from bertkit.data.deduplication import LeftOut
from bertkit.data.duplicates import document_hashes, first_occurrences, repeated_tokens
from bertkit.data.language_stream import training_and_held_out
from bertkit.data.languages import LANGUAGES
from bertkit.data.layouts import FullSentences
from bertkit.data.shard_writer import ShardWriter, TokenBlock
from bertkit.data.shards import TokenShards
from tests.data.toy_corpus import VOCABULARY_SIZE

Documents = list[list[list[int]]]
"""Documents of segments of tokens."""


def written(
    directory: Path, documents: Documents, *, languages: list[list[object]] | None = None, shard_tokens: int = 50
) -> TokenShards:
    writer = ShardWriter(directory, "toy", VOCABULARY_SIZE, shard_tokens=shard_tokens)
    for number, segments in enumerate(documents):
        block = TokenBlock(
            ids_T=np.array([token for segment in segments for token in segment]).astype(writer.dtype),
            length_K=np.array([len(segment) for segment in segments]),
            begins_K=np.arange(len(segments)) == 0,
            opens=False,
        )
        writer.append(block, number)
    return writer.finish({} if languages is None else {LANGUAGES: languages}, [])


def drawn_documents(count: int, *, kinds: int, seed: int = 0) -> Documents:
    """Documents of one to five segments, of which many are equal."""
    generator = np.random.default_rng(seed)
    different = [
        [generator.integers(5, 60, generator.integers(1, 9)).tolist() for _ in range(generator.integers(1, 6))]
        for _ in range(kinds)
    ]
    return [different[number] for number in generator.integers(0, kinds, count)]


def text_of(documents: Documents, number: int) -> tuple[int, ...]:
    return tuple(token for segment in documents[number] for token in segment)


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(5, 7), min_size=1, max_size=3), min_size=1, max_size=3), min_size=1, max_size=30
    ),
    at_once=st.integers(1, 40),
)
def test_equal_hashes_are_equal_tokens_however_many_are_read_at_once(
    documents: Documents, at_once: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With three tokens, many documents begin alike, contain one another, or are permutations of one another."""
    shards = written(tmp_path_factory.mktemp("shards"), documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_TOKENS_AT_ONCE", at_once)
        hashes = document_hashes(shards).tolist()
    texts = [text_of(documents, number) for number in range(len(documents))]
    assert len(set(hashes)) == len(set(texts))
    assert len(set(zip(hashes, texts, strict=True))) == len(set(texts))


def test_the_first_of_equal_documents_stays(tmp_path: Path) -> None:
    documents = drawn_documents(200, kinds=60)
    shards = written(tmp_path / "shards", documents)
    texts = [text_of(documents, number) for number in range(len(documents))]
    expected = [text not in texts[:number] for number, text in enumerate(texts)]
    assert first_occurrences(shards, None).tolist() == expected
    left_out = [text for text, kept in zip(texts, expected, strict=True) if not kept]
    tokens = sum(map(len, left_out))
    counted = LeftOut(len(left_out), tokens, tokens / shards.tokens, similarity=1)
    assert LeftOut.of(shards, True, tmp_path / "cache") == counted
    assert LeftOut.of(shards, True, tmp_path / "cache") == counted, "from the kept hashes"
    assert LeftOut.of(shards, False, None) is None


@pytest.mark.parametrize("several", [False, True])
def test_without_repeats_no_document_is_in_both_parts_and_each_is_in_one(several: bool, tmp_path: Path) -> None:
    documents = drawn_documents(400, kinds=150)
    languages: list[list[object]] | None = [["de", 0, 130], ["en", 130, 400]] if several else None
    shards = written(tmp_path / "shards", documents, languages=languages)
    data = DataConfig(layout=FullSentences(), sequence_length=32, held_out=0.2, deduplicate=True)

    def parts(data: DataConfig) -> list[np.ndarray]:
        streams = training_and_held_out(data, shards, seed=3, stage=0, plans=tmp_path / "plans")
        return [stream.documents_N2 for stream in streams]

    training_N2, held_out_N2 = parts(data)
    assert repeated_tokens(shards, training_N2, held_out_N2, None) == 0
    segments = sorted(number for low, high in [*training_N2, *held_out_N2] for number in range(low, high))
    kept_D = first_occurrences(shards, None)
    start_D1 = shards.document_start_D1
    assert segments == [n for d in np.flatnonzero(kept_D) for n in range(start_D1[d], start_D1[d + 1])]
    training_N2, held_out_N2 = parts(data.model_copy(update={"deduplicate": False}))
    known = repeated_tokens(shards, training_N2, held_out_N2, None)
    end_by_start = dict(zip(start_D1[:-1].tolist(), start_D1[1:].tolist(), strict=True))
    number = {low: document for document, low in enumerate(start_D1[:-1].tolist())}

    def whole(ranges_N2: np.ndarray) -> list[tuple[int, ...]]:
        return [text_of(documents, number[low]) for low, high in ranges_N2.tolist() if end_by_start.get(low) == high]

    trained = set(whole(training_N2))
    assert known == sum(len(text) for text in whole(held_out_N2) if text in trained) > 0


def test_of_a_document_that_is_cut_no_part_is_known(tmp_path: Path) -> None:
    """In a short text the ends of documents are held out; the last one ends with the corpus."""
    documents = [[[5, 6], [7], [8, 9]], [[10], [11]], [[5, 6], [7], [8, 9]], [[8, 9]]]
    shards = written(tmp_path / "shards", documents)
    ends_N2 = np.array([[2, 3], [4, 5], [7, 8]])
    starts_N2 = np.array([[0, 2], [3, 4], [5, 7], [8, 9]])
    assert repeated_tokens(shards, starts_N2, ends_N2, None) == 0
    assert repeated_tokens(shards, ends_N2, starts_N2, None) == 0
    assert repeated_tokens(shards, np.array([[0, 3], [3, 4]]), np.array([[4, 5], [5, 8], [8, 9]]), None) == 5
