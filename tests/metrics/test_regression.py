"""Correlations agree with scipy if they are defined, and otherwise are None, never NaN."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bertkit.errors import DataError
from bertkit.metrics import LOWER_IS_BETTER, METRICS, signed_score
from bertkit.metrics.regression import Pearson, mean_squared_error, pearson, spearman

NUMBER = st.floats(-50, 50, allow_subnormal=False).map(lambda x: round(x, 3))
PAIRS = st.lists(st.tuples(NUMBER, NUMBER), min_size=2, max_size=37)


@given(PAIRS)
def test_correlations_are_scipys_or_none(pairs: list[tuple[float, float]]) -> None:
    guessed, gold = (np.array(side) for side in zip(*pairs, strict=True))
    found = pearson(guessed, gold) | spearman(guessed, gold)
    if len(set(guessed)) == 1 or len(set(gold)) == 1:
        assert found == {"pearson": None, "spearman": None}
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {
            "pearson": stats.pearsonr(guessed, gold).statistic,
            "spearman": stats.spearmanr(guessed, gold).statistic,
        }
    assert found == pytest.approx(expected, abs=1e-9)


@given(PAIRS, st.floats(0.01, 100), NUMBER)
def test_scale_and_shift_change_nothing(pairs: list[tuple[float, float]], scale: float, shift: float) -> None:
    guessed, gold = (np.array(side) for side in zip(*pairs, strict=True))
    if np.ptp(guessed) < 0.1 or np.ptp(gold) == 0:
        return
    assert pearson(guessed * scale + shift, gold)["pearson"] == pytest.approx(
        pearson(guessed, gold)["pearson"], abs=1e-6
    )


@pytest.mark.parametrize("metric", [pearson, spearman])
@pytest.mark.parametrize(
    ("guessed", "gold"),
    [
        ([0.1] * 7, [1.0, 2.0, 3.0, 4.0, 5.0, 1.5, 2.5]),
        ([1.0, 2.0, 3.0], [2.2, 2.2, 2.2]),
        ([3.0], [3.0]),
        ([1.0, float("nan"), 2.0], [1.0, 2.0, 3.0]),
        ([1.0, float("inf"), 2.0], [1.0, 2.0, 3.0]),
    ],
)
def test_undefined_correlations_are_none_with_a_warning(
    metric: object, guessed: list[float], gold: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    name = metric.__name__
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metric(guessed, gold) == {name: None}
    assert f"{name} is undefined: the predictions or the references are constant" in caplog.text


def test_the_error_of_numbers_that_are_not_finite_is_none(caplog: pytest.LogCaptureFixture) -> None:
    for guessed in ([np.nan, 1.0], [np.inf, 1.0]):
        assert mean_squared_error(guessed, [1.0, 2.0]) == {"mean_squared_error": None}
    assert "mean_squared_error is undefined: the predictions or the references are not all finite" in caplog.text


def test_extreme_magnitudes_keep_their_correlation() -> None:
    gold = [1.0, 2.0, 4.0, 3.0]
    for scale in (1e-300, 1e-160, 1e160, 1e300):
        assert pearson([scale * x for x in gold], gold)["pearson"] == pytest.approx(1.0)


def test_ties_take_their_mean_rank() -> None:
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4])["spearman"] == pytest.approx(0.9486832980505138)


@given(PAIRS)
def test_pearson_by_totals_is_pearson(pairs: list[tuple[float, float]]) -> None:
    guessed, gold = (np.array(side) for side in zip(*pairs, strict=True))
    whole = pearson(guessed, gold)["pearson"]
    by_totals = Pearson().score(guessed, gold)
    assert np.isnan(by_totals) if whole is None else by_totals == pytest.approx(whole, abs=1e-9)


@pytest.mark.parametrize("guessed", [["high"], [[1.0]], []])
def test_what_is_no_number_is_refused(guessed: list[object]) -> None:
    with pytest.raises(DataError):
        pearson(guessed, [1.0])


def test_the_least_error_and_the_greatest_of_any_other_score_is_the_best() -> None:
    assert max((3.0, 0.5, None, 2.0), key=lambda score: signed_score("mean_squared_error", score)) == 0.5
    assert max((0.3, None, 0.9), key=lambda score: signed_score("pearson", score)) == 0.9
    assert set(METRICS) >= LOWER_IS_BETTER
