"""Pearson and Spearman correlation, and the mean squared error.

STS-B's two scores: Cer et al. 2017, arXiv:1708.00055, and GLUE (Wang et al. 2018, arXiv:1804.07461). A correlation
with a constant is undefined: the score is then None with a warning; scipy's NaN cannot be written to JSON or
ordered. Sibling of classification.py, whose references are labels.

Shapes: N examples, K numbers per example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from bertkit.arrays import Float64Array
from bertkit.errors import DataError
from bertkit.metrics.base import Additive, MeanOf, Scores, check_aligned, log

Numbers = Sequence[float] | NDArray[Any]


def _numbers(values: Numbers, whose: str) -> Float64Array:
    try:
        array = np.asarray(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise DataError(f"{whose} are not all numbers ({error}); a correlation needs one number per example") from error
    if array.ndim != 1:
        raise DataError(f"{whose} have shape {array.shape}; expected one number per example")
    return array


def _standardised(value_N: Float64Array) -> Float64Array:
    """Deviations from the mean, at unit length; NaN throughout where values are constant or not finite.

    Values are scaled by the largest deviation before squaring, so neither 1e-200 nor 1e200 is lost. Constancy is tested
    on the values: the mean of equal numbers may differ from them in the last bit, and rounding errors could correlate.
    """
    if not np.isfinite(value_N).all() or value_N.min() == value_N.max():
        return np.full_like(value_N, np.nan)
    value_N = value_N / np.abs(value_N).max()
    value_N = value_N - value_N.mean()
    value_N = value_N / np.abs(value_N).max()
    return np.asarray(value_N / np.linalg.norm(value_N))


def correlation(prediction_N: Float64Array, reference_N: Float64Array) -> float:
    """Pearson's r in [-1, 1], or NaN if undefined."""
    r = float(_standardised(prediction_N) @ _standardised(reference_N))
    return r if np.isnan(r) else min(1.0, max(-1.0, r))


class Pearson(Additive):
    """Pearson correlation by sums of x, y, x^2, y^2 and x y; both sides are standardised first, so nothing cancels."""

    name = "pearson"

    def rows(self, predictions: Numbers, references: Numbers) -> Float64Array:
        scale = np.sqrt(len(references))
        x_N = _standardised(_numbers(predictions, "predictions")) * scale
        y_N = _standardised(_numbers(references, "references")) * scale
        return np.stack([np.ones_like(x_N), x_N, y_N, x_N * x_N, y_N * y_N, x_N * y_N], axis=1)

    def value(self, totals: Float64Array) -> Float64Array:
        count, x, y, xx, yy, xy = np.moveaxis(totals, -1, 0)
        spread_x, spread_y = xx - x * x / count, yy - y * y / count
        # A resample may contain only one distinct example: the remaining spread is then rounding.
        exists = (spread_x > 1e-12 * xx) & (spread_y > 1e-12 * yy)
        product = np.where(exists, spread_x * spread_y, 1.0)
        return np.where(exists, np.clip((xy - x * y / count) / np.sqrt(product), -1.0, 1.0), np.nan)


def pearson(predictions: Numbers, references: Numbers) -> Scores:
    """`{"pearson"}`; None if predictions or references are constant.

    Raises:
        DataError: the lists are empty, of unequal length or not numbers.
    """
    check_aligned(predictions, references)
    value = correlation(_numbers(predictions, "predictions"), _numbers(references, "references"))
    return {"pearson": _or_none(value, "pearson")}


def spearman_value(predictions: Numbers, references: Numbers) -> float:
    """Pearson correlation of ranks, ties at their mean rank; NaN if undefined."""
    check_aligned(predictions, references)
    prediction_N, reference_N = _numbers(predictions, "predictions"), _numbers(references, "references")
    if not (np.isfinite(prediction_N).all() and np.isfinite(reference_N).all()):
        return float("nan")
    return correlation(rankdata(prediction_N), rankdata(reference_N))


def spearman(predictions: Numbers, references: Numbers) -> Scores:
    """`{"spearman"}`; None if predictions or references are constant.

    Raises:
        DataError: the lists are empty, of unequal length or not numbers.
    """
    return {"spearman": _or_none(spearman_value(predictions, references), "spearman")}


def _or_none(value: float, name: str) -> float | None:
    if np.isfinite(value):
        return float(value)
    constant = "" if name == MeanSquaredError.name else "constant, or "
    log.warning("%s is undefined: the predictions or the references are %snot all finite", name, constant)
    return None


class MeanSquaredError(MeanOf):
    """The mean of squared differences."""

    name = "mean_squared_error"

    def per_example(self, predictions: Numbers, references: Numbers) -> Float64Array:
        return np.square(_numbers(predictions, "predictions") - _numbers(references, "references"))


def mean_squared_error(predictions: Numbers, references: Numbers) -> Scores:
    """`{"mean_squared_error"}`; lower is better; None if a number is not finite.

    Raises:
        DataError: the lists are empty, of unequal length or not numbers.
    """
    check_aligned(predictions, references)
    value = float(MeanSquaredError().per_example(predictions, references).mean())
    return {"mean_squared_error": _or_none(value, "mean_squared_error")}
