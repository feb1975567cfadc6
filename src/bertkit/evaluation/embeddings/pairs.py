"""`bertkit eval pairs` and `triplets`: are pairs that belong together closer than others?

Reimers and Gurevych 2019, arXiv:1908.10084, section 4.4 (triplets: the positive is closer than the negative). The
scores of pairs are those of sentence-transformers' BinaryClassificationEvaluator: average precision, and accuracy and
F1 at the threshold that is best on the same pairs, which is optimistic.

Shapes: N pairs or triplets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.arrays import BoolArray, Float64Array
from bertkit.errors import DataError
from bertkit.evaluation.embeddings.run import VectorArguments, mean_with_interval, measure_table, with_interval
from bertkit.evaluation.embeddings.settings import VectorSettings
from bertkit.evaluation.embeddings.sources import VectorSource, encoded_once
from bertkit.evaluation.run import EvaluationResult, single_score
from bertkit.tasks.readers.common import field, text_in
from bertkit.tasks.readers.table import table_rows
from bertkit.visible import number_of

PAIR_COLUMNS = ("sentence1", "sentence2", "label")
TRIPLET_COLUMNS = ("anchor", "positive", "negative")
_MARKS = {"1": True, "0": False, "1.0": True, "0.0": False, "true": True, "false": False}


def evaluate_pairs(
    arguments: VectorArguments, table: Path, settings: VectorSettings, *, columns: Sequence[str] = PAIR_COLUMNS
) -> EvaluationResult:
    """Measure on a table of pairs with labels 0 and 1, and write the run's results.json.

    Raises:
        DataError: invalid model or data: a missing column, a label that is neither 0 nor 1, or only one label.
    """
    rows = []
    for where, record in table_rows(table):
        first, second = (text_in(field(record, name, where, "--columns"), f"{where}, {name}") for name in columns[:2])
        label = _MARKS.get(str(field(record, columns[2], where, "--columns")).strip().lower())
        if label is None:
            raise DataError(f"{where}, {columns[2]}: {record[columns[2]]!r}, expected 0 or 1")
        rows.append((first, second, label))
    if len({label for *_, label in rows}) < 2:
        raise DataError(
            f"{table}: {number_of(len(rows), 'pair')}, all with the same label; give pairs with both 0 and 1"
        )
    firsts, seconds, labels = zip(*rows, strict=True)

    def compute(source: VectorSource) -> dict[str, Any]:
        similarity_N = source.similarities(*encoded_once(source, firsts, seconds))
        found, thresholds = pair_scores(similarity_N, np.array(labels))
        return {
            "tasks": {table.stem: found},
            "average": found["average_precision"]["mean"],
            "pairs": len(rows),
            "thresholds": thresholds,
        }

    return measure_table("pairs", arguments, table, settings, [*firsts, *seconds], compute)


def pair_scores(cosine_N: Float64Array, label_N: BoolArray) -> tuple[dict[str, Any], dict[str, float]]:
    """Average precision with its interval, and accuracy and F1 at their best thresholds, with the thresholds."""

    def precision(predictions: Sequence[float], references: Sequence[bool]) -> float | None:
        return average_precision(np.array(predictions), np.array(references))

    guesses, references = cosine_N.tolist(), label_N.tolist()
    found = {"average_precision": with_interval(precision(guesses, references), guesses, references, precision)}
    best = best_thresholds(cosine_N, label_N)
    found |= {name: single_score(value) for name, (value, _) in best.items()}
    return found, {name: threshold for name, (_, threshold) in best.items()}


def best_thresholds(cosine_N: Float64Array, label_N: BoolArray) -> dict[str, tuple[float, float]]:
    """The best accuracy and the best F1 of classifying pairs by a threshold on the cosine, each with its threshold."""
    # After each pair in decreasing order of the cosine: the counts for a threshold there.
    order_N = np.argsort(-cosine_N, kind="stable")
    hits_N = np.cumsum(label_N[order_N])
    calls_N = np.arange(1, len(order_N) + 1)
    sorted_N = cosine_N[order_N]
    ends_N = np.append(sorted_N[1:] < sorted_N[:-1], True)
    wrong_N = (calls_N - hits_N) + (label_N.sum() - hits_N)
    accuracy_N = np.where(ends_N, 1 - wrong_N / len(label_N), -1.0)
    f1_N = np.where(ends_N, 2 * hits_N / (calls_N + label_N.sum()), -1.0)
    found = {}
    for name, value_N in (("accuracy", accuracy_N), ("f1", f1_N)):
        best = int(value_N.argmax())
        below = sorted_N[best + 1] if best + 1 < len(sorted_N) else sorted_N[best]
        found[name] = (float(value_N[best]), float((sorted_N[best] + below) / 2))
    return found


def average_precision(score_N: Float64Array, label_N: BoolArray) -> float | None:
    """The sum over thresholds of precision times the gain in recall, as in scikit-learn; None without positives."""
    positives = int(label_N.sum())
    if not positives:
        return None
    order_N = np.argsort(-score_N, kind="stable")
    hits_N = np.cumsum(label_N[order_N])
    sorted_N = score_N[order_N]
    last_N = np.flatnonzero(np.append(sorted_N[1:] < sorted_N[:-1], True))
    hits = hits_N[last_N]
    gained = np.diff(np.concatenate([[0], hits]))
    return float((hits / (last_N + 1) * gained).sum() / positives)


def evaluate_triplets(
    arguments: VectorArguments, table: Path, settings: VectorSettings, *, columns: Sequence[str] = TRIPLET_COLUMNS
) -> EvaluationResult:
    """Measure on a table of triplets, and write the run's results.json.

    Raises:
        DataError: invalid model or data, such as a missing column.
    """
    rows = [
        tuple(text_in(field(record, name, where, "--columns"), f"{where}, {name}") for name in columns)
        for where, record in table_rows(table)
    ]
    if not rows:
        raise DataError(f"{table}: contains no triplets")
    anchors, positives, negatives = zip(*rows, strict=True)

    def compute(source: VectorSource) -> dict[str, Any]:
        anchor_NE, positive_NE, negative_NE = encoded_once(source, anchors, positives, negatives)
        near_N, far_N = (source.similarities(anchor_NE, each) for each in (positive_NE, negative_NE))
        found = {
            "accuracy": mean_with_interval((near_N > far_N).astype(float).tolist()),
            "margin": mean_with_interval((near_N - far_N).tolist()),
        }
        return {
            "tasks": {table.stem: found},
            "average": found["accuracy"]["mean"],
            "triplets": len(rows),
            "ties": int((near_N == far_N).sum()),
        }

    return measure_table("triplets", arguments, table, settings, [*anchors, *positives, *negatives], compute)
