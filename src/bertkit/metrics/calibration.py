"""Calibration of a classifier's probabilities, and decision thresholds of labels.

Guo et al. 2017, arXiv:1706.04599: expected calibration error over equal bins of confidence (section 2), and one
temperature for all logits that minimises the negative log-likelihood (section 4.2). Thresholds of labels: Yang 2001,
SCut, the threshold of each label with the best F1 on labelled data.

Shapes: I examples, K labels.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize_scalar

from bertkit.arrays import BoolArray, Float64Array, Int64Array

BINS = 15
"""Number of bins, as in the paper."""
LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 0.1, 10.0
_SMALLEST = np.finfo(np.float64).tiny


def expected_calibration_error(probability_IK: Float64Array, label_I: Int64Array, *, bins: int = BINS) -> float:
    """The mean over examples of |accuracy - confidence| of their bin, a fraction.

    The confidence is the greatest probability; a bin contains confidences above its lower end, up to its upper end.
    """
    confidence_I = probability_IK.max(axis=1)
    correct_I = probability_IK.argmax(axis=1) == label_I
    bin_I = np.clip(np.ceil(confidence_I * bins).astype(np.int64) - 1, 0, bins - 1)
    gap_b = np.bincount(bin_I, weights=correct_I - confidence_I, minlength=bins)
    return float(np.abs(gap_b).sum() / label_I.size)


def fit_temperature(probability_IK: Float64Array, label_I: Int64Array) -> float:
    """The temperature with the least negative log-likelihood of the labels, between 0.1 and 10.

    Probabilities can replace logits, since their logarithms differ from these only by a constant per example.
    """
    log_IK = np.log(np.maximum(probability_IK, _SMALLEST))

    def loss(log_temperature: float) -> float:
        scaled_IK = log_IK / np.exp(log_temperature)
        greatest_I = scaled_IK.max(axis=1)
        normaliser_I = greatest_I + np.log(np.exp(scaled_IK - greatest_I[:, None]).sum(axis=1))
        return float((normaliser_I - scaled_IK[np.arange(label_I.size), label_I]).mean())

    bounds = (np.log(LEAST_TEMPERATURE), np.log(GREATEST_TEMPERATURE))
    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6}).x))


def at_temperature(probability_IK: Float64Array, temperature: float) -> Float64Array:
    """The probabilities of the logits divided by a temperature."""
    log_IK = np.log(np.maximum(probability_IK, _SMALLEST)) / temperature
    scaled_IK = np.exp(log_IK - log_IK.max(axis=1, keepdims=True))
    return np.asarray(scaled_IK / scaled_IK.sum(axis=1, keepdims=True))


def best_threshold(probability_I: Float64Array, holds_I: BoolArray) -> float:
    """The threshold on a label's probability with the best F1; if tied, the one nearest to one half.

    Candidates are halfway between neighbouring probabilities, so a threshold does not depend on a single example.
    """
    value_U = np.unique(probability_I)
    candidate_C = np.concatenate([[value_U[0] / 2], (value_U[:-1] + value_U[1:]) / 2, [0.5]])
    candidate_C = candidate_C[np.argsort(np.abs(candidate_C - 0.5), kind="stable")]
    ordered_I = np.sort(probability_I)
    positive_I = np.sort(probability_I[holds_I])
    predicted_C = ordered_I.size - np.searchsorted(ordered_I, candidate_C, side="left")
    right_C = positive_I.size - np.searchsorted(positive_I, candidate_C, side="left")
    f1_C = 2 * right_C / np.maximum(predicted_C + positive_I.size, 1)
    return float(candidate_C[int(f1_C.argmax())])
