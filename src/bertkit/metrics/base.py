"""Shared by metrics: checks of their input, and metrics that depend on the examples only through sums.

Not from a paper. A metric is a pure function of predictions and references (aligned lists, or mappings by question) to
fractions by name, never percent and never NaN: a score that is undefined on the data is None, with a warning.
An `Additive` metric is written once, as one row of numbers per example and a value of the rows' total; the bootstrap of
statistics.py can then resample totals instead of examples.

Shapes: N examples, K numbers per example, U distinct rows, M numbers per row of all models.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertkit.arrays import Float64Array, Int64Array
from bertkit.errors import DataError

log = logging.getLogger(__name__)

Scores = dict[str, float | None]
"""Fractions by name; None if the score is undefined on the data."""


Values = Any
"""A list or an array with one item per example; see each metric for the items it takes."""


def check_aligned(predictions: Values, references: Values) -> None:
    """Refuse lists of unequal length and empty ones.

    Raises:
        DataError: with both counts.
    """
    if len(predictions) != len(references):
        raise DataError(
            f"{len(predictions)} predictions for {len(references)} references; a metric needs exactly one prediction "
            "for each example, in the same order"
        )
    if len(references) == 0:
        raise DataError("a metric is undefined without examples; expected at least one prediction and its reference")


def ratio(part: Any, whole: Any) -> Float64Array:
    """Elementwise quotient, 0 where the whole is 0, as scikit-learn, seqeval and conlleval define P, R and F1."""
    part, whole = np.asarray(part, dtype=float), np.asarray(whole, dtype=float)
    return np.asarray(np.where(whole == 0, 0.0, part / np.where(whole == 0, 1.0, whole)))


def distinct(rows: Sequence[NDArray[Any]], times_N: Int64Array | None = None) -> tuple[list[NDArray[Any]], Int64Array]:
    """See `Additive.distinct_rows`; `times_N` is how often each of the rows occurs, by default once."""
    row_UM, number_N = np.unique(np.concatenate(rows, axis=1), axis=0, return_inverse=True)
    times_U = np.bincount(number_N.reshape(-1), weights=times_N).astype(np.int64)
    ends = np.cumsum([each.shape[1] for each in rows])[:-1]
    return np.split(row_UM, ends, axis=1), times_U


class Additive(ABC):
    """One score that is a function of a sum over examples.

    Attributes:
        name: the key of the score in the dictionary of the metric that reports it.
    """

    name: str

    @abstractmethod
    def rows(self, predictions: Values, references: Values) -> NDArray[Any]:
        """One row of K numbers per example, (N, K); takes the input of the metric's own function."""

    def distinct_rows(self, predictions: Sequence[Values], references: Values) -> tuple[list[Any], Int64Array]:
        """The distinct rows of the examples, (U, K) for each of some models, and how often each occurs, (U,); the rows
        are arrays or sparse matrices.

        Rows are distinct if they differ for any model, and in ascending order of all models' numbers.
        """
        return distinct([self.rows(own, references) for own in predictions])

    @abstractmethod
    def value(self, totals: Float64Array) -> Float64Array:
        """The score of each total, (..., K) to (...); NaN if undefined. The number of examples is a column."""

    def score(self, predictions: Values, references: Values) -> float:
        """The score of all examples.

        Raises:
            DataError: the lists are empty or of unequal length.
        """
        check_aligned(predictions, references)
        return float(self.value(self.rows(predictions, references).sum(axis=0)))


class MeanOf(Additive):
    """The mean over examples of one number each; subclasses define it."""

    @abstractmethod
    def per_example(self, predictions: Values, references: Values) -> Float64Array:
        """The number of each example, (N,)."""

    def rows(self, predictions: Values, references: Values) -> Float64Array:
        each_N = np.asarray(self.per_example(predictions, references), dtype=float)
        return np.stack([each_N, np.ones_like(each_N)], axis=1)

    def value(self, totals: Float64Array) -> Float64Array:
        return ratio(totals[..., 0], totals[..., 1])
