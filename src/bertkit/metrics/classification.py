"""Accuracy, F1 and Matthews correlation, for single labels and for sets of labels.

GLUE's choice of metrics: Wang et al. 2018, arXiv:1804.07461, section 3. Matthews correlation of several classes:
Gorodkin 2004, R_K, which is the ordinary coefficient for two. As in scikit-learn, the F1 of a class with neither
predictions nor references is 0, and the Matthews correlation of constant predictions is 0.
Labels are whole numbers or text, not mixed within a call. Sibling of regression.py, whose references are numbers.

Shapes: N examples, C classes, K numbers per example, U distinct combinations, X lists of labels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from bertkit.arrays import BoolArray, Float64Array, Int64Array
from bertkit.errors import DataError
from bertkit.metrics.base import Additive, MeanOf, Scores, check_aligned, distinct, ratio

Labels = Sequence[int] | Sequence[str] | NDArray[Any]


def label_array(labels: Labels) -> NDArray[Any]:
    """Labels as an array of text or of whole numbers, (N,).

    Raises:
        DataError: mixed labels, which numpy would silently convert to text, or logits instead of labels.
    """
    array = labels if isinstance(labels, np.ndarray) else np.asarray(list(labels))
    kinds = {isinstance(label, str) for label in labels} if array.dtype.kind == "U" else {False}
    if array.ndim != 1 or len(kinds) > 1 or array.dtype.kind not in "Uiub":
        raise DataError(
            f"labels are of type {array.dtype} and shape {array.shape}; expected one label per example, all of them "
            "text or all of them whole numbers (take the argmax of logits first)"
        )
    return array


def paired_labels(predictions: Labels, references: Labels) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both as arrays of the same kind.

    Raises:
        DataError: text on one side and numbers on the other: every comparison would be false.
    """
    check_aligned(predictions, references)
    prediction_N, reference_N = label_array(predictions), label_array(references)
    if (prediction_N.dtype.kind == "U") != (reference_N.dtype.kind == "U"):
        raise DataError(
            f"predictions like {prediction_N[0]!r} cannot match references like {reference_N[0]!r}: one side is text, "
            "the other numbers; map label ids to names, or names to ids"
        )
    return prediction_N, reference_N


class Accuracy(MeanOf):
    """The share of examples with the correct label."""

    name = "accuracy"

    def per_example(self, predictions: Labels, references: Labels) -> Float64Array:
        prediction_N, reference_N = paired_labels(predictions, references)
        return np.asarray(prediction_N == reference_N, dtype=float)


class BinaryF1(Additive):
    """F1 of one class: 2 TP / (2 TP + FP + FN); 0 if the class neither occurs nor is predicted."""

    name = "f1"

    def __init__(self, positive: int | str = 1) -> None:
        """`positive` is the class; for labels that are text, the number 1 means the text "1"."""
        self.positive = positive

    def rows(self, predictions: Labels, references: Labels) -> Float64Array:
        prediction_N, reference_N = paired_labels(predictions, references)
        positive = str(self.positive) if prediction_N.dtype.kind == "U" else self.positive
        predicted_N, gold_N = prediction_N == positive, reference_N == positive
        return np.stack([predicted_N & gold_N, predicted_N, gold_N], axis=1).astype(float)

    def value(self, totals: Float64Array) -> Float64Array:
        return ratio(2 * totals[..., 0], totals[..., 1] + totals[..., 2])


class ClassCounts(Additive):
    """Scores of correct, predicted and true counts per class; a row has these three for C classes, and a one."""

    def __init__(self, classes: Sequence[int] | Sequence[str] | None = None) -> None:
        """`classes` to average over; by default all that occur among predictions or references."""
        self.classes = classes

    def rows(self, predictions: Labels, references: Labels) -> Float64Array:
        prediction_N, reference_N = paired_labels(predictions, references)
        if self.classes is None:
            class_C: NDArray[Any] = np.union1d(prediction_N, reference_N)
        else:
            class_C = label_array(self.classes)
        predicted_NC, gold_NC = prediction_N[:, None] == class_C, reference_N[:, None] == class_C
        one_N1 = np.ones((len(reference_N), 1))
        return np.concatenate([predicted_NC & gold_NC, predicted_NC, gold_NC, one_N1], axis=1).astype(float)

    def distinct_rows(self, predictions: Sequence[Labels], references: Labels) -> tuple[list[Float64Array], Int64Array]:
        """See `Additive.distinct_rows`; rows are made only for distinct combinations of labels, since those of all
        examples would take gigabytes with hundreds of classes."""
        pairs = [paired_labels(own, references) for own in predictions]
        lists = [*(prediction_N for prediction_N, _ in pairs), pairs[0][1]]
        number_NX = np.stack([np.unique(each, return_inverse=True)[1].reshape(-1) for each in lists], axis=1)
        _, first_U, times_U = np.unique(number_NX, axis=0, return_index=True, return_counts=True)
        *prediction_U, reference_U = (each[first_U] for each in lists)
        return distinct([self.rows(own, reference_U) for own in prediction_U], times_U)

    def score(self, predictions: Labels, references: Labels) -> float:
        (row_UK,), times_U = self.distinct_rows([predictions], references)
        return float(self.value(times_U @ row_UK))

    @staticmethod
    def counts(totals: Float64Array) -> tuple[Float64Array, Float64Array, Float64Array, Float64Array]:
        """Correct, predicted and true counts per class, (..., C), and the number of examples, (...)."""
        right_C, predicted_C, gold_C = np.split(totals[..., :-1], 3, axis=-1)
        return right_C, predicted_C, gold_C, totals[..., -1]


class MacroF1(ClassCounts):
    """The unweighted mean of the classes' F1: of `classes`, or by default of those that occur."""

    name = "macro_f1"

    def value(self, totals: Float64Array) -> Float64Array:
        right_C, predicted_C, gold_C, _ = self.counts(totals)
        f1_C = ratio(2 * right_C, predicted_C + gold_C)
        if self.classes is not None:
            return np.asarray(f1_C.mean(axis=-1))
        # A resample of the examples may lack a class that the others have.
        found_C = predicted_C + gold_C > 0
        return ratio(f1_C.sum(axis=-1), found_C.sum(axis=-1).astype(float))


class MicroF1(ClassCounts):
    """F1 of the summed counts; equal to accuracy unless `classes` leaves some out (such as a "none" class)."""

    name = "micro_f1"

    def value(self, totals: Float64Array) -> Float64Array:
        right_C, predicted_C, gold_C, _ = self.counts(totals)
        return ratio(2 * right_C.sum(axis=-1), (predicted_C + gold_C).sum(axis=-1))


class Matthews(ClassCounts):
    """Matthews correlation R_K: (c s - sum p t) / sqrt((s^2 - sum p^2)(s^2 - sum t^2)).

    c of s examples are correct; p and t are a class's predicted and true counts. 0 if predictions or references are
    constant.
    """

    name = "matthews_correlation"

    def value(self, totals: Float64Array) -> Float64Array:
        right_C, predicted_C, gold_C, count = self.counts(totals)
        covariance = right_C.sum(axis=-1) * count - (predicted_C * gold_C).sum(axis=-1)
        spread_guessed = count**2 - (predicted_C**2).sum(axis=-1)
        spread_gold = count**2 - (gold_C**2).sum(axis=-1)
        return ratio(covariance, np.sqrt(spread_guessed) * np.sqrt(spread_gold))


def accuracy(predictions: Labels, references: Labels) -> Scores:
    """`{"accuracy"}`. Raises DataError for empty, unequal or mismatched lists, like all metrics here."""
    return {"accuracy": Accuracy().score(predictions, references)}


def f1(predictions: Labels, references: Labels, positive: int | str = 1) -> Scores:
    """`{"f1"}` of the class `positive` (in GLUE, class 1 of MRPC and QQP)."""
    return {"f1": BinaryF1(positive).score(predictions, references)}


def macro_f1(predictions: Labels, references: Labels, classes: Sequence[Any] | None = None) -> Scores:
    """`{"macro_f1"}` over `classes`, by default those that occur on either side."""
    return {"macro_f1": MacroF1(classes).score(predictions, references)}


def micro_f1(predictions: Labels, references: Labels, classes: Sequence[Any] | None = None) -> Scores:
    """`{"micro_f1"}` over `classes`, by default those that occur on either side."""
    return {"micro_f1": MicroF1(classes).score(predictions, references)}


def matthews_correlation(predictions: Labels, references: Labels) -> Scores:
    """`{"matthews_correlation"}` of two classes (CoLA) or more (GLUE's diagnostic set)."""
    return {"matthews_correlation": Matthews().score(predictions, references)}


LabelSets = Sequence[Collection[Any]] | NDArray[Any]


def indicators(
    predictions: LabelSets, references: LabelSets, labels: Sequence[Any] | None = None
) -> tuple[BoolArray, BoolArray]:
    """The labels of each example, (N, C) twice, from collections of labels or from arrays of zeros and ones.

    Raises:
        DataError: arrays of different shapes or with other numbers, or a label that is not in `labels`.
    """
    check_aligned(predictions, references)
    if isinstance(predictions, np.ndarray) and isinstance(references, np.ndarray):
        for array in (predictions, references):
            binary = array.dtype.kind == "b" or np.isin(array, (0, 1)).all()
            if array.ndim != 2 or array.shape != references.shape or not binary:
                raise DataError(
                    f"label indicators of shapes {predictions.shape} and {references.shape}; expected two arrays of "
                    "the same shape (examples, labels) with only 0 and 1 (threshold probabilities first)"
                )
        return predictions.astype(bool), references.astype(bool)
    for row in (*predictions, *references):
        if isinstance(row, str):
            raise DataError(f"the set of labels {row!r} is text; expected a list of labels, such as [{row!r}]")
    seen = {label for row in (*predictions, *references) for label in row}
    names = list(labels) if labels is not None else sorted(seen)
    column = {name: index for index, name in enumerate(names)}
    if unknown := sorted(map(str, seen - column.keys())):
        raise DataError(f"unknown label {unknown[0]!r}; expected one of: {', '.join(map(str, names))}")
    both = []
    for rows in (predictions, references):
        array_NC = np.zeros((len(rows), len(names)), dtype=bool)
        for index, row in enumerate(rows):
            array_NC[index, [column[label] for label in row]] = True
        both.append(array_NC)
    return both[0], both[1]


class MultiLabel(Additive):
    """Counts of each label over sets of labels; a row is correct, predicted and true labels, each of length C."""

    def __init__(self, labels: Sequence[Any] | None = None) -> None:
        self.labels = labels

    def parts(self, predicted_NC: BoolArray, gold_NC: BoolArray) -> list[BoolArray]:
        """The parts of the rows."""
        return [predicted_NC & gold_NC, predicted_NC, gold_NC]

    def rows(self, predictions: LabelSets, references: LabelSets) -> BoolArray:
        return np.concatenate(self.parts(*indicators(predictions, references, self.labels)), axis=1)

    def distinct_rows(self, predictions: Sequence[LabelSets], references: LabelSets) -> tuple[list[Any], Int64Array]:
        """See `Additive.distinct_rows`; the rows are compared as bits and returned as sparse matrices, since those of
        numbers would take gigabytes with hundreds of labels."""
        rows = [self.rows(own, references) for own in predictions]
        bits = np.packbits(np.concatenate(rows, axis=1), axis=1)
        _, first_U, times_U = np.unique(bits, axis=0, return_index=True, return_counts=True)
        return [csr_array(row_NK[first_U]).astype(float) for row_NK in rows], times_U

    def score(self, predictions: LabelSets, references: LabelSets) -> float:
        """See `Additive.score`; without the rows, which would take gigabytes with hundreds of labels."""
        parts = self.parts(*indicators(predictions, references, self.labels))
        return float(self.value(np.concatenate([part.sum(axis=0) for part in parts]).astype(float)))


class MultiLabelMicroF1(MultiLabel):
    """F1 of the counts summed over labels."""

    name = "micro_f1"

    def value(self, totals: Float64Array) -> Float64Array:
        right_C, predicted_C, gold_C = np.split(totals, 3, axis=-1)
        return ratio(2 * right_C.sum(axis=-1), (predicted_C + gold_C).sum(axis=-1))


class MultiLabelMacroF1(MultiLabel):
    """The unweighted mean of the labels' F1; a label in `labels` that no example has counts as 0.

    The last C numbers of a row are ones for labels that no example has. A resample that lacks another label leaves it
    out, as MacroF1 does.
    """

    name = "macro_f1"

    def parts(self, predicted_NC: BoolArray, gold_NC: BoolArray) -> list[BoolArray]:
        absent_C = ~(predicted_NC | gold_NC).any(axis=0)
        return [*super().parts(predicted_NC, gold_NC), np.broadcast_to(absent_C, gold_NC.shape)]

    def value(self, totals: Float64Array) -> Float64Array:
        right_C, predicted_C, gold_C, absent_C = np.split(totals, 4, axis=-1)
        f1_C = ratio(2 * right_C, predicted_C + gold_C)
        counted_C = (predicted_C + gold_C > 0) | (absent_C > 0)
        return ratio(f1_C.sum(axis=-1), counted_C.sum(axis=-1).astype(float))


class SubsetAccuracy(MeanOf):
    """The share of examples with exactly the correct set of labels."""

    name = "subset_accuracy"

    def __init__(self, labels: Sequence[Any] | None = None) -> None:
        self.labels = labels

    def per_example(self, predictions: LabelSets, references: LabelSets) -> Float64Array:
        predicted_NC, gold_NC = indicators(predictions, references, self.labels)
        return np.asarray((predicted_NC == gold_NC).all(axis=1), dtype=float)


def multi_label(predictions: LabelSets, references: LabelSets, labels: Sequence[Any] | None = None) -> Scores:
    """`{"micro_f1", "macro_f1", "subset_accuracy"}` of sets of labels.

    `labels` lists all labels; by default macro F1 averages over those that occur (for arrays: over all columns).
    """
    both = indicators(predictions, references, labels)
    return {kind.name: kind().score(*both) for kind in (MultiLabelMicroF1, MultiLabelMacroF1, SubsetAccuracy)}
