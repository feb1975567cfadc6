"""Accuracy, F1 and Matthews correlation agree with scikit-learn on any labels, and refuse incomparable inputs."""

from __future__ import annotations

import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as oracle

from bertkit.errors import DataError
from bertkit.metrics.base import Additive, distinct
from bertkit.metrics.classification import (
    MacroF1,
    Matthews,
    MicroF1,
    MultiLabelMacroF1,
    accuracy,
    f1,
    macro_f1,
    matthews_correlation,
    micro_f1,
    multi_label,
)

PAIRS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=41)
SETS = st.lists(st.tuples(*[st.sets(st.sampled_from(("anger", "joy", "fear", "love")))] * 2), min_size=1, max_size=23)


@settings(max_examples=40)
@given(PAIRS, st.sampled_from([int, str]))
def test_all_single_label_scores_are_scikit_learns(pairs: list[tuple[int, int]], kind: type) -> None:
    guessed, gold = ([kind(label) for label in side] for side in zip(*pairs, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {
            "accuracy": oracle.accuracy_score(gold, guessed),
            "f1": oracle.f1_score(gold, guessed, labels=[kind(1)], average="macro", zero_division=0),
            "macro_f1": oracle.f1_score(gold, guessed, average="macro", zero_division=0),
            "micro_f1": oracle.f1_score(gold, guessed, average="micro", zero_division=0),
            "matthews_correlation": oracle.matthews_corrcoef(gold, guessed),
        }
    found: dict[str, float | None] = {}
    for metric in (accuracy, f1, macro_f1, micro_f1, matthews_correlation):
        found |= metric(guessed, gold)
    assert found == pytest.approx(expected, abs=1e-12)


@settings(max_examples=40)
@given(PAIRS)
def test_scores_do_not_depend_on_the_order_of_examples(pairs: list[tuple[int, int]]) -> None:
    order = np.random.default_rng(len(pairs)).permutation(len(pairs))
    guessed, gold = (np.array(side) for side in zip(*pairs, strict=True))
    for metric in (accuracy, f1, macro_f1, micro_f1, matthews_correlation):
        assert metric(guessed[order], gold[order]) == pytest.approx(metric(guessed, gold), abs=1e-12)


@settings(max_examples=40)
@given(SETS)
def test_scores_of_label_sets_are_scikit_learns(pairs: list[tuple[set[str], set[str]]]) -> None:
    names = ("anger", "fear", "joy", "love")
    array = np.array([[[name in labels for name in names] for labels in pair] for pair in pairs], dtype=int)
    guessed, gold = array[:, 0], array[:, 1]
    expected = {
        "micro_f1": oracle.f1_score(gold, guessed, average="micro", zero_division=0),
        "macro_f1": oracle.f1_score(gold, guessed, average="macro", zero_division=0),
        "subset_accuracy": oracle.accuracy_score(gold, guessed),
    }
    assert multi_label(guessed, gold) == pytest.approx(expected)
    sets = [[tuple(pair[side]) for pair in pairs] for side in (0, 1)]
    assert multi_label(*sets, labels=names) == pytest.approx(expected)


@settings(max_examples=40)
@given(PAIRS, st.sets(st.integers(0, 4), min_size=1))
def test_f1_over_chosen_classes_is_scikit_learns(pairs: list[tuple[int, int]], classes: set[int]) -> None:
    guessed, gold = zip(*pairs, strict=True)
    chosen = sorted(classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [
            oracle.f1_score(gold, guessed, labels=chosen, average=kind, zero_division=0) for kind in ("macro", "micro")
        ]
    assert macro_f1(guessed, gold, chosen)["macro_f1"] == pytest.approx(expected[0])
    assert micro_f1(guessed, gold, chosen)["micro_f1"] == pytest.approx(expected[1])


def test_constant_predictions_have_matthews_correlation_zero_and_the_positive_class_its_majority_f1() -> None:
    gold = [1, 1, 0, 1]
    assert matthews_correlation([1, 1, 1, 1], gold) == {"matthews_correlation": 0.0}
    assert f1([1, 1, 1, 1], gold) == {"f1": pytest.approx(6 / 7)}
    assert f1([0, 0, 0, 0], gold) == {"f1": 0.0}


def test_one_example_is_scored() -> None:
    assert accuracy(["0"], ["0"]) == {"accuracy": 1.0}
    assert matthews_correlation([1], [1]) == {"matthews_correlation": 0.0}
    assert macro_f1([1], [0]) == {"macro_f1": 0.0}


def test_a_class_never_predicted_pulls_macro_f1_down_but_an_unheard_of_one_does_not() -> None:
    assert macro_f1([0, 0, 0], [0, 0, 2])["macro_f1"] == pytest.approx((0.8 + 0) / 2)
    assert macro_f1([0, 0, 0], [0, 0, 2], classes=[0, 1, 2])["macro_f1"] == pytest.approx(0.8 / 3)


def test_nobody_having_any_label_scores_zero_f1_and_full_subset_accuracy() -> None:
    assert multi_label([(), ()], [(), ()]) == {"micro_f1": 0.0, "macro_f1": 0.0, "subset_accuracy": 1.0}


@pytest.mark.parametrize(
    ("guessed", "gold", "words"),
    [
        ([], [], "without examples"),
        ([1], [1, 0], "1 predictions for 2 references"),
        (["1"], [1], "one side is text"),
        ([0.7], [1], "argmax"),
        ([[0.1, 0.9]], [1], "argmax"),
        (["1", 1], ["1", "1"], "all of them"),
    ],
)
def test_what_cannot_be_compared_is_refused(guessed: list[object], gold: list[object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        accuracy(guessed, gold)


@pytest.mark.parametrize(
    ("guessed", "gold", "labels", "words"),
    [
        (["joy"], [["joy"]], None, r"such as \['joy'\]"),
        ([["joy"]], [["hope"]], ["joy", "fear"], "unknown label 'hope'"),
        (np.array([[0.3, 0.8]]), np.array([[0, 1]]), None, "threshold"),
        (np.array([[0, 1]]), np.array([[0, 1, 0]]), None, "the same shape"),
    ],
)
def test_wrong_label_sets_are_refused(guessed: object, gold: object, labels: list[str] | None, words: str) -> None:
    with pytest.raises(DataError, match=words):
        multi_label(guessed, gold, labels)


@settings(max_examples=40)
@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=41), st.sampled_from([None, [1, 2]]))
def test_distinct_rows_are_those_of_all_examples(labels: list[tuple[int, int, int]], classes: list[int] | None) -> None:
    first, second, gold = (list(side) for side in zip(*labels, strict=True))
    metric = MicroF1(classes)
    rows, times_U = metric.distinct_rows([first, second], gold)
    expected, expected_U = distinct([metric.rows(first, gold), metric.rows(second, gold)])
    assert times_U.tolist() == expected_U.tolist()
    for found, own in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(found, own)


@settings(max_examples=40)
@given(SETS, st.sampled_from([None, ["anger", "fear", "joy", "love", "pride"]]))
def test_distinct_sets_of_labels_are_those_of_all_examples(
    pairs: list[tuple[set[str], set[str]]], labels: list[str] | None
) -> None:
    guessed, gold = ([sorted(labels) for labels in side] for side in zip(*pairs, strict=True))
    models, metric = [guessed, guessed[::-1]], MultiLabelMacroF1(labels)
    rows, times_U = metric.distinct_rows(models, gold)
    expected, expected_U = Additive.distinct_rows(metric, models, gold)
    assert times_U.tolist() == expected_U.tolist()
    for found, own in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(found.toarray(), own)


def test_distinct_sets_of_hundreds_of_labels_take_no_number_per_label() -> None:
    # As numbers, the rows would take 48 MB, and as much again while they are compared.
    sets = [[number % 300, number % 299] for number in range(5_000)]
    tracemalloc.start()
    try:
        MultiLabelMacroF1(range(300)).distinct_rows([sets], sets)
        assert tracemalloc.get_traced_memory()[1] < 25_000_000
    finally:
        tracemalloc.stop()


def test_memory_grows_with_the_different_pairs_of_labels_not_with_the_examples() -> None:
    # A row per example would take 400 MB.
    label_N = np.arange(50_000) % 333
    tracemalloc.start()
    try:
        assert MacroF1().score(label_N, label_N) == Matthews().score(label_N, label_N) == 1.0
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()
