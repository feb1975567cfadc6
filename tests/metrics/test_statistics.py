"""Summaries of seeds, degenerate runs, and a paired bootstrap with valid p-values."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Sequence
from itertools import combinations_with_replacement
from operator import eq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import issparse

from bertkit.errors import DataError, UsageError
from bertkit.metrics import METRICS, RESAMPLED
from bertkit.metrics.base import Additive
from bertkit.metrics.classification import Accuracy, BinaryF1, MultiLabelMacroF1
from bertkit.metrics.statistics import (
    ConstantBaseline,
    bootstrap_interval,
    constant_baseline_warning,
    paired_bootstrap,
    summarise,
)

SCORES = st.lists(st.floats(-1, 1), min_size=2, max_size=9)


@given(SCORES)
def test_the_summary_is_that_of_the_standard_library(scores: list[float]) -> None:
    summary = summarise(dict(enumerate(scores)))
    found = (summary["mean"], summary["std"], summary["median"], summary["n"])
    expected = (statistics.mean(scores), statistics.stdev(scores), statistics.median(scores), len(scores))
    assert found == pytest.approx(expected, abs=1e-9)
    assert summary["seeds"] == scores


def test_one_run_has_no_spread_and_no_run_no_summary() -> None:
    assert summarise({3: 0.5}) == {"mean": 0.5, "std": None, "median": 0.5, "n": 1, "seeds": [0.5]}
    with pytest.raises(DataError, match="no runs"):
        summarise({})


def test_undefined_scores_are_kept_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        summary = summarise({2: 0.4, 0: None, 1: float("nan"), 7: 0.6})
    assert json.loads(json.dumps(summary)) == {
        "mean": pytest.approx(0.5),
        "std": pytest.approx(0.02**0.5),
        "median": pytest.approx(0.5),
        "n": 2,
        "seeds": [None, None, 0.4, 0.6],
    }
    assert "2 of 4 runs have no defined score" in caplog.text
    assert summarise({0: None}) == {"mean": None, "std": None, "median": None, "n": 0, "seeds": [None]}


GOLD = ["1", "1", "0", "1", "0"]


def always_1(score: float = 0.6, standard_error: float = 0.0) -> ConstantBaseline:
    return ConstantBaseline("1", "accuracy", score, standard_error)


@pytest.mark.parametrize(
    ("predictions", "references", "score", "baseline", "reason"),
    [
        (["1"] * 5, GOLD, 0.6, always_1(), "always predicting '1': it predicts nothing else"),
        (["0", "1", "0", "1", "1"], GOLD, 0.6, always_1(), "always predicting '1': accuracy 0.6000, that of the"),
        (["0", "0", "1", "1", "1"], GOLD, 0.2, always_1(), "no better than always predicting '1'"),
        (["1", "1", "0", "1", "1"], GOLD, 0.8, always_1(), None),
        (["1", "1", "0", "1", "1"], GOLD, 0.8, always_1(0.6, 0.25), "accuracy 0.8000, standard error 0.2500, that"),
        (["1", "1", "0", "1", "1"], GOLD, 0.8, always_1(0.6, 0.15), None),
        (["1", "1", "0", "1", "1"], GOLD, 0.8, None, None),
        ([2.5000001, 2.5, 2.5000002], [1.0, 2.0, 3.0], 0.1, None, "always predicting 2.5: it predicts nothing else"),
        ([2.5, 2.5, 2.5], [1.0, 2.0, 3.0], None, None, "always predicting 2.5"),
        ([2.6, 2.5, 2.4], [1.0, 2.0, 3.0], None, None, "the model's score is undefined"),
        ([2.6, 2.5, 2.4], [1.0, 2.0, 3.0], float("nan"), None, "undefined"),
        # (1.6^2 + 0.5^2 + 0.6^2) / 3 against (1 + 0 + 1) / 3, then 0.25 against the same
        ([2.6, 2.5, 2.4], [1.0, 2.0, 3.0], -1.0, None, "the mean, 2: its mean squared error 1.057 is not below"),
        ([1.5, 2.5, 2.5], [1.0, 2.0, 3.0], 0.9, None, None),
        ([11.0, 12.0, 13.0], [1.0, 2.0, 3.0], 1.0, None, "the labels' variance, 0.6667"),
        ([1.0, 2.0], [2.0, 2.0], 0.1, None, None),
        ([3, 0, 2, 1], [0, 3, 2, 1], 0.5, None, None),  # whole numbers are labels, such as the index of a choice
        (["1"], ["1"], 1.0, always_1(1.0), None),
        (["O", "O", "O"], ["O", "B-PER", "O"], 0.0, None, "always predicting 'O'"),
    ],
)
def test_runs_that_learned_nothing_are_flagged_with_the_reason(
    predictions: list[object],
    references: list[object],
    score: float | None,
    baseline: ConstantBaseline | None,
    reason: str | None,
) -> None:
    found = constant_baseline_warning(predictions, references, score, baseline)
    assert found is None if reason is None else reason in (found or "")


def noisy(gold: np.ndarray, share_wrong: float, generator: np.random.Generator) -> list[int]:
    wrong = generator.random(len(gold)) < share_wrong
    return np.where(wrong, 1 - gold, gold).tolist()


def sample(seed: int, count: int, wrong_a: float, wrong_b: float) -> tuple[list[int], list[int], list[int]]:
    generator = np.random.default_rng(seed)
    gold = generator.integers(0, 2, size=count)
    return noisy(gold, wrong_a, generator), noisy(gold, wrong_b, generator), gold.tolist()


def test_equal_models_have_p_one_and_no_interval() -> None:
    a, _, gold = sample(1, 57, 0.2, 0.2)
    result = paired_bootstrap(a, a, gold, Accuracy(), resamples=500)
    assert (result.difference, result.low, result.high, result.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_a_large_difference_is_significant_and_its_interval_holds_it() -> None:
    a, b, gold = sample(2, 311, 0.4, 0.1)
    result = paired_bootstrap(a, b, gold, BinaryF1(), resamples=2000)
    assert result.low < result.difference < result.high
    assert result.low > 0
    assert result.p_value == pytest.approx(1 / 2001)
    turned = paired_bootstrap(b, a, gold, BinaryF1(), resamples=2000)
    assert turned.difference == -result.difference
    assert turned.p_value == result.p_value


def test_the_seed_decides_the_result() -> None:
    a, b, gold = sample(3, 83, 0.3, 0.25)
    first, again, other = (paired_bootstrap(a, b, gold, Accuracy(), resamples=300, seed=s) for s in (5, 5, 6))
    assert first == again
    assert first != other


def test_totals_and_calls_draw_from_the_same_distribution() -> None:
    a, b, gold = sample(4, 61, 0.35, 0.2)
    fast = paired_bootstrap(a, b, gold, Accuracy(), resamples=20_000)
    slow = paired_bootstrap(a, b, gold, lambda p, r: float(np.mean(np.equal(p, r))), resamples=4000)
    assert (fast.score_a, fast.score_b) == pytest.approx((slow.score_a, slow.score_b))
    assert fast.p_value == pytest.approx(slow.p_value, abs=0.03)
    assert (fast.low, fast.high) == pytest.approx((slow.low, slow.high), abs=0.03)


def test_the_interval_of_accuracy_is_the_normal_one_for_many_examples() -> None:
    """The variance of the difference of paired means is known, which gives an oracle for width and p-value."""
    a, b, gold = sample(5, 4001, 0.3, 0.28)
    each = np.equal(b, gold).astype(float) - np.equal(a, gold).astype(float)
    error = each.std() / len(gold) ** 0.5
    result = paired_bootstrap(a, b, gold, Accuracy(), resamples=20_000)
    assert result.high - result.low == pytest.approx(2 * 1.96 * error, rel=0.05)
    tails = 2 * (1 - statistics.NormalDist().cdf(abs(each.mean()) / error))
    assert result.p_value == pytest.approx(tails, abs=0.02)


def test_models_that_are_equally_good_are_called_different_as_rarely_as_promised() -> None:
    p_values = [
        paired_bootstrap(*sample(seed, 151, 0.3, 0.3), Accuracy(), resamples=400, seed=seed).p_value
        for seed in range(300)
    ]
    rejected = np.mean(np.array(p_values) <= 0.1)
    assert 0.05 < rejected < 0.16


EXAMPLES = {
    "multi_label": ([("a",), (), ("a", "b"), ("b",)], [("a",), ("b",), ("a",), ("b",)]),
    "pearson": ([0.5, 2.0, 2.5, 5.0], [1.0, 2.0, 3.0, 4.0]),
    "spearman": ([0.5, 2.0, 2.5, 5.0], [1.0, 2.0, 4.0, 3.0]),
    "squad": (["fox", "red hen", ""], [["fox", "the fox"], ["hen"], ["goose"]]),
    "squad_v2": (["fox", "red hen", ""], [["fox", "the fox"], ["hen"], []]),
    "conlleval": ([["B-PER", "O"], ["I-LOC", "O"]], [["B-PER", "O"], ["B-LOC", "O"]]),
    "strict_iob2": ([["B-PER", "O"], ["I-LOC", "O"]], [["B-PER", "O"], ["B-LOC", "O"]]),
    "tag_accuracy": ([["B-PER", "O"], ["I-LOC", "O"]], [["B-PER", "O"], ["B-LOC", "O"]]),
}
LABELS = ([0, 1, 1, 2, 1], [0, 1, 0, 1, 1])


@pytest.mark.parametrize(("metric", "score"), RESAMPLED)
def test_what_is_resampled_is_the_metric_itself(metric: str, score: str) -> None:
    predictions, references = EXAMPLES.get(metric, LABELS)
    resampled = RESAMPLED[metric, score]()
    one = resampled.score if isinstance(resampled, Additive) else resampled
    if metric.startswith("squad"):
        by_question = [{str(i): item for i, item in enumerate(side)} for side in (predictions, references)]
        assert one(predictions, references) == pytest.approx(METRICS[metric](*by_question)[score])
    else:
        assert one(predictions, references) == pytest.approx(METRICS[metric](predictions, references)[score])
    result = paired_bootstrap(predictions, predictions, references, resampled, resamples=60)
    assert (result.score_a, result.difference) == (pytest.approx(one(predictions, references)), 0.0)
    assert result.resamples + result.undefined == 60
    assert 0 < result.p_value <= 1


@pytest.mark.parametrize(("metric", "score"), RESAMPLED)
def test_the_totals_of_any_resample_give_the_score_of_its_examples(metric: str, score: str) -> None:
    resampled = RESAMPLED[metric, score]()
    if not isinstance(resampled, Additive):
        return
    predictions, references = EXAMPLES.get(metric, LABELS)
    rows = resampled.rows(predictions, references)
    row_NK = rows.toarray() if issparse(rows) else rows
    for drawn in combinations_with_replacement(range(len(references)), len(references)):
        guessed, gold = ([side[i] for i in drawn] for side in (predictions, references))
        if metric.startswith("squad"):
            guessed, gold = ({str(i): item for i, item in enumerate(side)} for side in (guessed, gold))
        expected = METRICS[metric](guessed, gold)[score]
        found = float(resampled.value(row_NK[list(drawn)].sum(axis=0)))
        assert found == pytest.approx(np.nan if expected is None else expected, nan_ok=True, abs=1e-9), drawn


def test_an_interval_of_one_model_computes_each_score_once() -> None:
    calls = [0]

    def share(predictions: Sequence[int], references: Sequence[int]) -> float:
        calls[0] += 1
        return sum(map(eq, predictions, references)) / len(references)

    low, high = bootstrap_interval([0, 1, 1, 0], [0, 1, 0, 0], share) or (None, None)
    assert calls == [1_001], "on all examples, and on each resample"
    assert low is not None
    assert high is not None
    assert low <= 0.75 <= high


def test_macro_f1_is_compared_although_one_model_predicts_a_class_more() -> None:
    a, b, gold = [0, 1, 1, 0, 2], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0]
    result = paired_bootstrap(a, b, gold, RESAMPLED["macro_f1", "macro_f1"](), resamples=200)
    assert result.score_a == pytest.approx(METRICS["macro_f1"](a, gold)["macro_f1"])
    assert result.score_b == pytest.approx(METRICS["macro_f1"](b, gold)["macro_f1"])


def test_perfect_predictions_have_a_perfect_macro_f1_on_resamples_that_lack_a_class_or_label() -> None:
    gold = [0, 1, 1, 0, 0, 1, 2]
    assert bootstrap_interval(gold, gold, RESAMPLED["macro_f1", "macro_f1"]()) == (1.0, 1.0)
    sets = [["abc"[label]] for label in gold]
    for labels, score in ((None, 1.0), (["a", "b", "c"], 1.0), (["a", "b", "c", "never"], 0.75)):
        metric = MultiLabelMacroF1(labels)
        assert metric.score(sets, sets) == score
        # Without the rare label, "never" is one of three instead of one of four.
        assert bootstrap_interval(sets, sets, metric) == (1.0 if score == 1.0 else pytest.approx(2 / 3), score)


def test_resamples_without_a_score_are_counted_and_dropped() -> None:
    result = paired_bootstrap(
        [1.0, 2.0, 2.0], [1.0, 3.0, 2.0], [1.0, 2.0, 3.0], RESAMPLED["pearson", "pearson"](), resamples=999
    )
    assert result.undefined > 0
    assert result.resamples + result.undefined == 999


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(DataError, match="2 predictions for 1"):
        paired_bootstrap([1, 2], [1], [1], Accuracy())
    with pytest.raises(DataError, match="undefined on all examples"):
        paired_bootstrap([1.0, 1.0], [1.0, 2.0], [1.0, 2.0], RESAMPLED["pearson", "pearson"]())
    with pytest.raises(UsageError, match="confidence 95"):
        paired_bootstrap([1], [1], [1], Accuracy(), confidence=95)
