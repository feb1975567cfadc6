"""Calibration against independent formulas in the style of scikit-learn, and against known optima."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax

from bertkit.metrics.calibration import at_temperature, best_threshold, expected_calibration_error, fit_temperature


def drawn(seed: int, examples: int, labels: int, temperature: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, labels drawn from them at a temperature, and the probabilities of the logits."""
    generator = np.random.default_rng(seed)
    logit_IK = generator.normal(size=(examples, labels)) * 3
    truth_IK = softmax(logit_IK / temperature, axis=1)
    label_I = np.array([generator.choice(labels, p=row) for row in truth_IK])
    return logit_IK, label_I, softmax(logit_IK, axis=1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_that_the_labels_were_drawn_at_is_found(temperature: float) -> None:
    logit_IK, label_I, probability_IK = drawn(1, 6001, 5, temperature)
    found = fit_temperature(probability_IK, label_I)
    assert found == pytest.approx(temperature, rel=0.07)
    losses = {
        each: -log_softmax(logit_IK / each, axis=1)[np.arange(label_I.size), label_I].mean()
        for each in np.geomspace(0.1, 10, 301)
    }
    assert found == pytest.approx(min(losses, key=losses.__getitem__), rel=0.02)
    np.testing.assert_allclose(at_temperature(probability_IK, found), softmax(logit_IK / found, axis=1), atol=1e-9)


def test_the_error_is_that_of_the_paper_and_falls_at_the_right_temperature() -> None:
    _, label_I, probability_IK = drawn(2, 3001, 3, 2.5)
    confidence_I, right_I = probability_IK.max(axis=1), probability_IK.argmax(axis=1) == label_I
    expected = 0.0
    for bin in range(15):
        inside = (confidence_I > bin / 15) & (confidence_I <= (bin + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(right_I[inside].mean() - confidence_I[inside].mean())
    found = expected_calibration_error(probability_IK, label_I)
    assert found == pytest.approx(expected, abs=1e-12)
    tempered = at_temperature(probability_IK, fit_temperature(probability_IK, label_I))
    assert expected_calibration_error(tempered, label_I) < found / 4


def test_certainty_that_is_right_has_no_error_and_the_least_temperature() -> None:
    label_I = np.array([0, 1, 1, 0, 1])
    probability_IK = np.eye(2)[label_I]
    assert expected_calibration_error(probability_IK, label_I) == 0.0
    assert fit_temperature(0.8 * probability_IK + 0.1, label_I) == pytest.approx(0.1, rel=1e-3)


def test_every_bin_counts_by_itself_and_the_last_one_takes_what_is_rounded_above_one() -> None:
    """All right in one bin and all wrong in the next, so that merged bins have another error; the last example of the
    last bin is wrong."""
    places = [(bin, (bin + part) / 15) for bin in range(15) for part in (0.2, 0.5, 0.9)]
    places += [(14, 0.94)] * 30 + [(14, 1 + 1e-7)]
    bin_I, confidence_I = (np.array(column) for column in zip(*places, strict=True))
    right_I = (bin_I + 1) % 2
    right_I[-1] = 0
    expected = sum(abs((right_I - confidence_I)[bin_I == bin].sum()) for bin in range(15)) / len(places)
    probability_IK = np.stack([confidence_I, np.zeros(len(places))], axis=1)
    assert expected_calibration_error(probability_IK, 1 - right_I) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=30))
def test_no_threshold_has_a_better_f1_and_the_nearest_to_one_half_is_taken(
    rows: list[tuple[int, bool]],
) -> None:
    probability_I = np.array([value / 9 for value, _ in rows])
    holds_I = np.array([holds for _, holds in rows])

    def f1(threshold: float) -> float:
        predicted_I = probability_I >= threshold
        return 2 * (predicted_I & holds_I).sum() / max(1, predicted_I.sum() + holds_I.sum())

    best = best_threshold(probability_I, holds_I)
    assert f1(best) == max(f1(threshold) for threshold in (*np.linspace(0, 1, 181), 1.1) if threshold <= 1.0)
    values = [0.0, *sorted(set(probability_I))]
    candidates = [0.5, *(np.mean(pair) for pair in pairwise(values))]
    nearest = min(abs(each - 0.5) for each in candidates if f1(each) == f1(best))
    assert abs(best - 0.5) == pytest.approx(nearest)
