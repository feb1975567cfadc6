"""Nearly equal documents are found by an estimate of the Jaccard index of their 5-grams, however the text is read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bertkit.data import near_duplicates as module
from bertkit.data.deduplication import LeftOut, kept_documents
from bertkit.data.duplicates import first_occurrences
from bertkit.data.near_duplicates import FUNCTIONS, GRAM, near_duplicates, rows_of_a_band
from bertkit.data.shards import TokenShards
from tests.data.test_duplicates import written

LENGTHS = (1, 3, 4, 5, 6, 11, 40, 97, 233)


def similar_documents(*, seed: int) -> list[list[int]]:
    """Documents of all lengths, each followed by itself with ever more of its end replaced, and the whole shuffled."""
    generator = np.random.default_rng(seed)
    documents = []
    for length in LENGTHS * 3:
        original = generator.integers(5, 60, length).tolist()
        documents.append(original)
        for share in (0.0, 0.05, 0.1, 0.3, 0.5, 0.8):
            kept = round(length * (1 - share))
            documents.append(original[:kept] + generator.integers(5, 60, length - kept).tolist())
    return [documents[number] for number in generator.permutation(len(documents))]


def grams(document: list[int]) -> set[tuple[int, ...]]:
    return {tuple(document[first : first + GRAM]) for first in range(max(len(document) - GRAM + 1, 1))}


def greatest_jaccard(documents: list[list[int]]) -> np.ndarray:
    """The index of each document and the most similar earlier one, computed from the sets themselves."""
    sets = [grams(each) for each in documents]
    return np.array(
        [max((len(own & other) / len(own | other) for other in sets[:n]), default=0.0) for n, own in enumerate(sets)]
    )


def shards_of(directory: Path, documents: list[list[int]]) -> TokenShards:
    segments = [[each[:2], each[2:]] if len(each) > 2 else [each] for each in documents]
    return written(directory, segments, shard_tokens=5000)


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9])
def test_documents_are_near_if_the_jaccard_index_of_their_5_grams_is_high(similarity: float, tmp_path: Path) -> None:
    documents = similar_documents(seed=5)
    jaccard_D = greatest_jaccard(documents)
    near_D = near_duplicates(shards_of(tmp_path / "shards", documents), similarity, None)
    error = 3 * np.sqrt(similarity * (1 - similarity) / FUNCTIONS)
    assert near_D[jaccard_D == 1].all()
    assert not near_D[jaccard_D < similarity - error].any()
    clear_D = jaccard_D > similarity + error
    assert near_D[clear_D].mean() > 0.9
    assert 0 < clear_D.sum() < clear_D.size


@pytest.mark.parametrize("at_once", [1, 7, 64, 500])
def test_the_result_does_not_depend_on_how_many_tokens_are_read_at_once(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document may be longer than a part, or parts may end inside of one."""
    shards = shards_of(tmp_path / "shards", similar_documents(seed=9))
    whole = near_duplicates(shards, 0.7, None)
    monkeypatch.setattr(module, "_TOKENS_AT_ONCE", at_once)
    np.testing.assert_array_equal(near_duplicates(shards, 0.7, None), whole)


def test_the_estimate_is_without_bias(tmp_path: Path) -> None:
    """Over 300 pairs of 60 tokens, the mean error is within three standard errors of 0."""
    generator = np.random.default_rng(2)
    documents = []
    for _ in range(300):
        one = generator.integers(5, 60, 60).tolist()
        documents += [one, one[:50] + generator.integers(5, 60, 10).tolist()]
    shards = shards_of(tmp_path / "shards", documents)
    byte_DF, _ = module._signatures(shards, rows_of_a_band(0.8), None)
    first_P = np.arange(0, 600, 2)
    estimated_P = module._similarity(byte_DF, first_P, first_P + 1)
    sets = [grams(each) for each in documents]
    jaccard_P = np.array([len(sets[n] & sets[n + 1]) / len(sets[n] | sets[n + 1]) for n in first_P])
    error_P = estimated_P - jaccard_P
    assert abs(error_P.mean()) < 3 * error_P.std() / np.sqrt(error_P.size)
    expected = np.sqrt(np.mean(jaccard_P * (1 - jaccard_P)) / FUNCTIONS)
    assert error_P.std() == pytest.approx(expected, rel=0.2)


def test_of_similar_documents_the_first_stays_and_equal_ones_always_go(tmp_path: Path) -> None:
    documents = similar_documents(seed=11)
    shards = shards_of(tmp_path / "shards", documents)
    cache = tmp_path / "cache"
    kept_by = {each: kept_documents(shards, each, cache) for each in (True, 0.9, 0.6)}
    for stricter_D, laxer_D in pairwise(kept_by.values()):
        assert stricter_D is not None
        assert laxer_D is not None
        assert laxer_D[0]
        assert (laxer_D <= stricter_D).all()
        assert laxer_D.sum() < stricter_D.sum()
    np.testing.assert_array_equal(kept_by[True], first_occurrences(shards, None))
    for similarity, kept_D in kept_by.items():
        again_D = kept_documents(shards, similarity, cache)
        np.testing.assert_array_equal(again_D, kept_D, err_msg="from the cache")
        left_out = LeftOut.of(shards, similarity, cache)
        assert left_out is not None
        lengths = [len(each) for each, kept in zip(documents, kept_D, strict=True) if not kept]  # type: ignore[arg-type]
        assert (left_out.documents, left_out.tokens) == (len(lengths), sum(lengths))


@pytest.mark.parametrize("similarity", [0.5, 0.6, 0.75, 0.8, 0.9, 0.99])
def test_nine_of_ten_similar_pairs_agree_in_a_band_of_as_many_functions_as_possible(similarity: float) -> None:
    def found(rows: int) -> float:
        return 1 - (1 - similarity**rows) ** (FUNCTIONS // rows)

    rows = rows_of_a_band(similarity)
    assert FUNCTIONS % rows == 0
    assert found(rows) >= 0.9 > found(2 * rows)
