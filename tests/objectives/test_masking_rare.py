"""Rare words first: counts are exact, and draws equal successive draws in proportion to weights."""

from __future__ import annotations

import pickle
from itertools import permutations
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter
from scipy.stats import chisquare

from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking import AnyUnits, RareTokens
from tests.data.toy_corpus import vocabulary, write_shards
from tests.objectives.test_masked_lm import VOCABULARY_SIZE, made_samples, with_roles

COUNTS = {11: 1000, 12: 100, 13: 10, 14: 0}
"""How often these tokens occur in the corpus; one that never occurs counts as occurring once."""


def prepared(directory: Path, exponent: float = 0.7) -> RareTokens:
    counts_V = np.ones(VOCABULARY_SIZE, dtype=np.int64)
    counts_V[list(COUNTS)] = list(COUNTS.values())
    shards = write_shards(directory, [[3, 4]])
    shards.__dict__["token_counts_V"] = counts_V
    return RareTokens(exponent=exponent).prepared(with_roles("pad", "cls", "sep", "mask"), shards)


def sentences(count: int) -> Samples:
    """[CLS] 11 12 13 14 [SEP], many times."""
    samples = made_samples([6] * count)
    ids_T = samples.ids_T.copy()
    ids_T[~samples.special_T] = np.tile(list(COUNTS), count)
    return samples.with_changes(ids_T=ids_T)


def test_pairs_are_drawn_as_by_successive_draws_without_replacement(tmp_path: Path) -> None:
    count = 30_000
    units = prepared(tmp_path)
    before = sentences(count)
    chosen = units.choose(before, vocabulary(VOCABULARY_SIZE), np.full(count, 2), Draw(3))
    pair_B2 = before.ids_T[chosen.index_M].reshape(count, 2) - 11
    weight = np.array([max(1, each) for each in COUNTS.values()], dtype=np.float64) ** -0.7
    expected = np.zeros((4, 4))
    for first, second in permutations(range(4), 2):
        share = weight[first] / weight.sum() * weight[second] / (weight.sum() - weight[first])
        expected[min(first, second), max(first, second)] += share
    observed = np.zeros((4, 4))
    np.add.at(observed, (pair_B2[:, 0], pair_B2[:, 1]), 1)
    upper = np.triu_indices(4, 1)
    assert observed.sum() == observed[upper].sum() == count
    assert chisquare(observed[upper], expected[upper] * count).pvalue > 1e-3


def test_without_an_exponent_every_token_is_as_likely(tmp_path: Path) -> None:
    count = 20_000
    before = sentences(count)
    chosen = prepared(tmp_path, exponent=0.0).choose(before, vocabulary(VOCABULARY_SIZE), np.ones(count, int), Draw(3))
    observed = np.bincount(before.ids_T[chosen.index_M] - 11, minlength=4)
    assert chisquare(observed).pvalue > 1e-3


def test_counts_are_exact_special_tokens_are_left_and_company_changes_nothing(tmp_path: Path) -> None:
    lengths = np.random.default_rng(2).integers(3, 60, 200).tolist()
    before = made_samples(lengths)
    objective = MaskedLM(units=prepared(tmp_path), max_predictions=7)
    after = objective.corrupt(before, vocabulary(VOCABULARY_SIZE), Draw(1))
    targets = after.targets["masked_lm"]
    counts_B = np.bincount(after.sequence_T[targets.index_M], minlength=len(lengths))
    np.testing.assert_array_equal(counts_B, [min(7, max(1, round(0.15 * n)), n - 2) for n in lengths])
    assert not before.special_T[targets.index_M].any()
    assert np.all(np.diff(targets.index_M) > 0)
    parts = [objective.corrupt(part, vocabulary(VOCABULARY_SIZE), Draw(1)).ids_T for part in before.split(90)]
    np.testing.assert_array_equal(np.concatenate(parts), after.ids_T)


def test_settings_choose_it_by_name_and_prepared_it_travels_to_workers(tmp_path: Path) -> None:
    assert TypeAdapter(AnyUnits).validate_python({"name": "rare"}) == RareTokens(exponent=0.7)
    units, before = prepared(tmp_path), sentences(50)
    there = pickle.loads(pickle.dumps(units))
    arguments = (before, vocabulary(VOCABULARY_SIZE), np.full(50, 2), Draw(3))
    np.testing.assert_array_equal(there.choose(*arguments).index_M, units.choose(*arguments).index_M)
