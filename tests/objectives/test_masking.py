"""Units of masking: the papers' procedures step by step, their distributions, and invariants of all of them."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from scipy.stats import chisquare

from bertkit.data.config import DataConfig
from bertkit.data.layouts import ContinuousText, ReusedSegments
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.models.families.bert import BertConfig
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking import AnyUnits, MaskingStrategy, Ngrams, Spans, Tokens, WindowedNgrams, Words
from bertkit.objectives.masking.base import within_budget
from tests.data.toy_corpus import MASK, vocabulary
from tests.objectives.test_masked_lm import VOCABULARY_SIZE as PLAIN_SIZE
from tests.objectives.test_masked_lm import made_samples
from tests.objectives.worded import (
    VOCABULARY,
    masked_lm,
    phrases,
    single_pieces,
    worded_samples,
    words_of,
)

WHOLE = [pytest.param(units, id=units.name) for units in (Words(), Ngrams(), phrases())]
ALL = [
    pytest.param(Tokens(), id="pieces"),
    *WHOLE,
    *(pytest.param(units, id=units.name) for units in (Spans(), WindowedNgrams(longest=3))),
]
LENGTHS = np.random.default_rng(4).integers(3, 90, 160).tolist()


def corrupted(samples: Samples, units: MaskingStrategy, seed: int = 1, **settings: object) -> Samples:
    return masked_lm(units, **settings).corrupt(samples, VOCABULARY, Draw(seed))


def chosen(samples: Samples) -> np.ndarray:
    chosen_T = np.zeros(samples.ids_T.size, dtype=np.bool_)
    chosen_T[samples.targets["masked_lm"].index_M] = True
    return chosen_T


@pytest.mark.parametrize("units", [*(each.values[0] for each in WHOLE), Spans(), WindowedNgrams(longest=3)])
def test_whole_words_need_text_that_is_read_from_left_to_right(units: MaskingStrategy) -> None:
    """From right to left, the subwords of a word would be taken for the end of another."""
    (fault,) = MaskedLM(units=units).errors(DataConfig(layout=ReusedSegments()), BertConfig())
    assert fault.startswith("objective.masked_lm.units masks whole words")
    assert MaskedLM(units=units).errors(DataConfig(layout=ContinuousText()), BertConfig()) == []
    for single in (Tokens(), WindowedNgrams()):
        assert MaskedLM(units=single).errors(DataConfig(layout=ReusedSegments()), BertConfig()) == []


def test_pieces_are_chosen_and_replaced_as_before_there_were_units() -> None:
    """The digest is that of the masked LM without units."""
    samples = made_samples(np.random.default_rng(7).integers(3, 129, 500).tolist())
    after = MaskedLM().corrupt(samples, vocabulary(PLAIN_SIZE), Draw(1))
    digest = hashlib.sha256(after.ids_T.astype("<i8").tobytes()).hexdigest()
    assert digest == "7af6145f0b760547e9133f7d686102e18e0069a495c3bd20cb026e6767aeef78"
    assert not after.targets["masked_lm"].places


@pytest.mark.parametrize("units", ALL)
def test_the_count_is_never_exceeded_and_nothing_fixed_is_touched(units: MaskingStrategy) -> None:
    before = worded_samples(LENGTHS)
    before = before.with_changes(causal_B=np.arange(len(LENGTHS)) % 7 == 3)
    after = corrupted(before, units, max_predictions=9)
    chosen_T = chosen(after)
    ordinary_B = np.bincount(before.sequence_T[~before.fixed_T], minlength=len(LENGTHS))
    allowed_B = np.minimum(masked_lm(units, max_predictions=9).counts_B(before.lengths_B, ordinary_B), 9)
    assert np.all(np.bincount(before.sequence_T[chosen_T], minlength=len(LENGTHS)) <= allowed_B)
    assert not (chosen_T & before.fixed_T).any()
    np.testing.assert_array_equal(after.ids_T[~chosen_T], before.ids_T[~chosen_T])
    np.testing.assert_array_equal(after.targets["masked_lm"].id_M, before.ids_T[chosen_T])


@pytest.mark.parametrize("units", WHOLE)
def test_words_are_never_split_and_none_is_left_that_would_fit(units: MaskingStrategy) -> None:
    before = worded_samples(LENGTHS)
    chosen_T = chosen(corrupted(before, units))
    left = 0
    for sequence, length in enumerate(LENGTHS):
        words = words_of(before, sequence)
        taken = [chosen_T[word].all() for word in words]
        assert taken == [chosen_T[word].any() for word in words]
        left_over = max(1, round(0.15 * length)) - sum(map(len, (w for w, t in zip(words, taken, strict=True) if t)))
        if units.name != "phrases":  # there a word may be part of a phrase that does not fit
            assert all(len(word) > left_over for word, is_taken in zip(words, taken, strict=True) if not is_taken)
        left += left_over
    assert left < 0.1 * chosen_T.sum()


@pytest.mark.parametrize("units", ALL)
@settings(max_examples=25)
@given(lengths=st.lists(st.integers(3, 60), min_size=2, max_size=9), max_tokens=st.integers(3, 200))
def test_a_sample_is_masked_the_same_in_any_company(
    units: MaskingStrategy, lengths: list[int], max_tokens: int
) -> None:
    whole = corrupted(worded_samples(lengths), units)
    parts = [corrupted(part, units) for part in worded_samples(lengths).split(max_tokens)]
    np.testing.assert_array_equal(np.concatenate([part.ids_T for part in parts]), whole.ids_T)
    for part, cut in zip(parts, whole.split(max_tokens), strict=True):
        ours, theirs = part.targets["masked_lm"], cut.targets["masked_lm"]
        np.testing.assert_array_equal(ours.index_M, theirs.index_M)
        assert ours.places.keys() == theirs.places.keys()
        for name, place_M in ours.places.items():
            np.testing.assert_array_equal(place_M, theirs.places[name])


@given(st.data())
def test_what_fits_the_budget_is_what_a_walk_through_the_list_takes(data: st.DataObject) -> None:
    lists = data.draw(st.lists(st.lists(st.integers(1, 6), max_size=12), min_size=1, max_size=5))
    counts = data.draw(st.lists(st.integers(0, 14), min_size=len(lists), max_size=len(lists)))
    expected = []
    for sizes, left in zip(lists, counts, strict=True):
        for size in sizes:
            expected.append(size <= left)
            left -= size * expected[-1]
    length_C = np.array([size for sizes in lists for size in sizes], dtype=np.int64)
    sequence_C = np.repeat(np.arange(len(lists)), [len(sizes) for sizes in lists])
    assert within_budget(length_C, sequence_C, np.array(counts)).tolist() == expected


def released_words(words: list[list[int]], count: int, key_T: np.ndarray) -> list[list[int]]:
    taken: list[list[int]] = []
    for word in sorted(words, key=lambda word: key_T[word[0]]):
        if sum(map(len, taken)) + len(word) <= count:
            taken.append(word)
    return taken


def released_ngrams(
    words: list[list[int]], count: int, key_T: np.ndarray, number_T: np.ndarray, special_T: np.ndarray
) -> list[list[int]]:
    """ALBERT's procedure: shorten while too long, then drop overlaps."""
    taken: list[list[int]] = []
    covered: set[int] = set()
    for first in sorted(range(len(words)), key=lambda first: key_T[words[first][0]]):
        ngram = [words[first]]
        while len(ngram) < number_T[words[first][0]] and first + len(ngram) < len(words):
            if special_T[ngram[-1][-1] + 1]:
                break
            ngram.append(words[first + len(ngram)])
        while len(ngram) > 1 and len(covered) + sum(map(len, ngram)) > count:
            ngram.pop()
        tokens = [token for word in ngram for token in word]
        if len(covered) + len(tokens) <= count and not covered & set(tokens):
            taken.append(tokens)
            covered.update(tokens)
    return taken


def released_spans(
    words: list[list[int]], count: int, key_T: np.ndarray, number_T: np.ndarray, special_T: np.ndarray
) -> set[int]:
    """SpanBERT's procedure: anchors that are already masked are redrawn, the budget cuts the last span."""
    word_of = {token: number for number, word in enumerate(words) for token in word}
    masked: set[int] = set()
    for anchor in sorted(word_of, key=lambda token: key_T[token]):
        if anchor in masked or len(masked) >= count:
            continue
        first = word_of[anchor]
        for number in range(first, min(first + number_T[anchor], len(words))):
            if number > first and special_T[words[number][0] - 1]:
                break
            for token in words[number]:
                if len(masked) < count:
                    masked.add(token)
    return masked


def test_words_are_those_of_the_released_procedure() -> None:
    samples, draw = worded_samples(LENGTHS), Draw(1)
    counts_B = np.maximum(1, np.rint(0.15 * samples.lengths_B)).astype(np.int64)
    ours = Words().choose(samples, VOCABULARY, counts_B, draw)
    key_T = samples.uniform_T(draw, "mask/choose")
    taken = [
        word
        for sequence, count in enumerate(counts_B.tolist())
        for word in released_words(words_of(samples, sequence), count, key_T)
    ]
    assert ours.index_M.tolist() == sorted(token for word in taken for token in word)
    assert dict(zip(ours.index_M.tolist(), ours.first_M.tolist(), strict=True)) == {
        token: word[0] for word in taken for token in word
    }


def test_mpnets_words_reach_the_count_by_cutting_the_last_one() -> None:
    """As the end of a permutation of words, `span_perm` of its code: the last subwords of the word that exceeds it."""
    samples, draw = worded_samples(LENGTHS), Draw(1)
    counts_B = np.maximum(1, np.rint(0.15 * samples.lengths_B)).astype(np.int64)
    key_T = samples.uniform_T(draw, "mask/choose")
    expected: list[int] = []
    for sequence, count in enumerate(counts_B.tolist()):
        in_order = sorted(words_of(samples, sequence), key=lambda word: key_T[word[0]])
        permuted = [token for word in reversed(in_order) for token in word]
        expected += permuted[len(permuted) - count :]
    ours = Words(cut=True).choose(samples, VOCABULARY, counts_B, draw)
    assert ours.index_M.tolist() == sorted(expected)


def test_ngrams_are_those_of_the_released_procedure() -> None:
    samples, draw, units = worded_samples(LENGTHS), Draw(1), Ngrams()
    counts_B = np.maximum(1, np.rint(0.25 * samples.lengths_B)).astype(np.int64)
    ours = units.choose(samples, VOCABULARY, counts_B, draw)
    key_T, number_T = samples.uniform_T(draw, "mask/choose"), units.drawn(samples.uniform_T(draw, "mask/length"))
    taken = [
        ngram
        for sequence, count in enumerate(counts_B.tolist())
        for ngram in released_ngrams(words_of(samples, sequence), count, key_T, number_T, samples.special_T)
    ]
    assert dict(zip(ours.index_M.tolist(), ours.first_M.tolist(), strict=True)) == {
        token: ngram[0] for ngram in taken for token in ngram
    }
    assert len(taken) > 500


def test_spans_are_those_of_the_released_procedure() -> None:
    samples, draw, units = worded_samples(LENGTHS), Draw(1), Spans()
    ordinary_B = np.bincount(samples.sequence_T[~samples.fixed_T])
    counts_B = units.counts_B(0.15, samples.lengths_B, ordinary_B)
    ours = units.choose(samples, VOCABULARY, counts_B, draw)
    key_T, number_T = samples.uniform_T(draw, "mask/choose"), units.drawn(samples.uniform_T(draw, "mask/length"))
    taken: set[int] = set()
    for sequence, count in enumerate(counts_B.tolist()):
        taken |= released_spans(words_of(samples, sequence), count, key_T, number_T, samples.special_T)
    assert ours.index_M.tolist() == sorted(taken)
    for index, first in zip(ours.index_M.tolist(), ours.first_M.tolist(), strict=True):
        assert set(range(first, index + 1)) <= taken
        assert first - 1 not in taken


def test_spans_mask_the_rate_of_the_ordinary_tokens_rounded_up_exactly() -> None:
    before = worded_samples(LENGTHS)
    ordinary_B = np.bincount(before.sequence_T[~before.special_T])
    counts_B = np.bincount(before.sequence_T[chosen(corrupted(before, Spans()))], minlength=len(LENGTHS))
    np.testing.assert_array_equal(counts_B, [-(-15 * ordinary // 100) for ordinary in ordinary_B.tolist()])


def runs(index_M: np.ndarray, sequence_M: np.ndarray) -> Counter[int]:
    """Number of runs of neighbours of each length."""
    ends = np.flatnonzero((np.diff(index_M) > 1) | (np.diff(sequence_M) > 0))
    return Counter(np.diff(np.concatenate([[-1], ends, [index_M.size - 1]])).tolist())


def lengths_until(count: int, share_N: np.ndarray) -> np.ndarray:
    """Expected number of spans of each length if lengths are drawn until their sum reaches a count and the last is
    cut."""
    expected = np.zeros((count + 1, count + 1))
    for left in range(1, count + 1):
        for length, share in enumerate(share_N.tolist(), start=1):
            used = min(length, left)
            expected[left] += share * expected[left - used]
            expected[left, used] += share
    return expected[count]


def assert_distributed(observed: Counter[int], expected_N: np.ndarray) -> None:
    """Chi-square over the lengths from 1."""
    observed_N = np.array([observed[length] for length in range(1, expected_N.size)])
    assert chisquare(observed_N, expected_N[1:] / expected_N[1:].sum() * observed_N.sum()).pvalue > 1e-4


def test_drawn_lengths_follow_the_clipped_geometric_and_one_over_n() -> None:
    uniform = Draw(3).uniform("lengths", position=np.arange(200_000))
    geometric_N = 0.8 ** np.arange(10) * 0.2
    for drawn, share_N in ((Spans().drawn(uniform), geometric_N), (Ngrams().drawn(uniform), 1 / np.arange(1, 4))):
        observed_N = np.bincount(drawn)[1:]
        assert chisquare(observed_N, share_N / share_N.sum() * uniform.size).pvalue > 1e-3
    assert abs(Spans().drawn(uniform).mean() - 3.8) < 0.03  # the paper's mean


def test_span_lengths_follow_the_clipped_geometric() -> None:
    """In long texts, where spans rarely meet; the last span of each text is cut, which the expectation includes."""
    samples = made_samples([2_502] * 300)
    counts_B = np.full(300, 25)
    ours = Spans().choose(samples, single_pieces(PLAIN_SIZE), counts_B, Draw(5))
    share_N = 0.8 ** np.arange(10) * 0.2 / (1 - 0.8**10)
    observed = runs(ours.index_M, samples.sequence_T[ours.index_M])
    met = sum(number for length, number in observed.items() if length > 10)
    assert met < 0.02 * observed.total()
    assert_distributed(observed, lengths_until(25, share_N)[:11])


def test_ngram_frequencies_are_one_over_n() -> None:
    """With a count of three words, the last n-gram is shortened to the remainder, which the expectation includes."""
    samples = made_samples([302] * 3_000)
    ours = Ngrams().choose(samples, single_pieces(PLAIN_SIZE), np.full(3_000, 3), Draw(5))
    observed = Counter(np.unique(ours.first_M, return_counts=True)[1].tolist())
    assert_distributed(observed, lengths_until(3, 1 / np.arange(1, 4) / (1 + 1 / 2 + 1 / 3)))


def test_a_span_is_hidden_replaced_or_kept_as_one_and_other_units_piece_by_piece() -> None:
    before = worded_samples([120] * 900)
    for units, mixes in ((Spans(), False), (Words(), True), (Ngrams(), True), (phrases(), True)):
        after = corrupted(before, units)
        index_M = after.targets["masked_lm"].index_M
        hidden_M, kept_M = after.ids_T[index_M] == MASK, after.ids_T[index_M] == before.ids_T[index_M]
        for share_M, expected in ((hidden_M, 0.8), (kept_M, 0.1)):
            assert abs(share_M.mean() - expected) < 0.02
        together_M = index_M[1:] == index_M[:-1] + 1
        mixed = (hidden_M[1:] != hidden_M[:-1])[together_M].mean()
        # A random token is [MASK] once in V draws.
        assert mixed > 0.2 if mixes else mixed < 0.01


def test_a_settings_tree_chooses_units_by_name_and_pieces_are_the_default() -> None:
    assert MaskedLM().units == Tokens()
    units = TypeAdapter(AnyUnits).validate_python({"name": "spans", "p": 0.3, "longest": 7})
    assert units == Spans(p=0.3, longest=7)
    dumped = MaskedLM(units=Ngrams(longest=2)).model_dump(mode="json")
    assert MaskedLM.model_validate(dumped) == MaskedLM(units=Ngrams(longest=2))


def test_prepared_units_travel_to_workers() -> None:
    samples = worded_samples([50, 33])
    there = pickle.loads(pickle.dumps(masked_lm(phrases())))
    np.testing.assert_array_equal(
        there.corrupt(samples, VOCABULARY, Draw(1)).ids_T, corrupted(samples, phrases()).ids_T
    )
