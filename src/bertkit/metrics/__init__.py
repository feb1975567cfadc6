"""Metrics: pure functions of predictions and references to fractions by name; a new one is one function and one entry.

Imports numpy and scipy only; metrics/modules.py wraps each in an `evaluate.Metric`, through which tasks compute scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any

from bertkit.errors import UsageError
from bertkit.metrics import classification, mlqa, regression, spans, tagging
from bertkit.metrics.base import Additive, Scores

Metric = Callable[..., Scores]

METRICS: dict[str, Metric] = {
    "accuracy": classification.accuracy,
    "f1": classification.f1,
    "macro_f1": classification.macro_f1,
    "micro_f1": classification.micro_f1,
    "matthews_correlation": classification.matthews_correlation,
    "multi_label": classification.multi_label,
    "pearson": regression.pearson,
    "spearman": regression.spearman,
    "mean_squared_error": regression.mean_squared_error,
    "squad": spans.squad,
    "squad_v2": spans.squad_v2,
    **{f"mlqa_{language}": partial(mlqa.mlqa, language) for language in mlqa.LANGUAGES},
    "conlleval": tagging.conlleval,
    "strict_iob2": tagging.strict_iob2,
    "tag_accuracy": tagging.tag_accuracy,
}
"""By name: `(predictions, references) -> {score: fraction or None}`."""

RESAMPLED: dict[tuple[str, str], Callable[[], Additive | Callable[[Any, Any], float]]] = {
    ("accuracy", "accuracy"): classification.Accuracy,
    ("f1", "f1"): classification.BinaryF1,
    ("macro_f1", "macro_f1"): classification.MacroF1,
    ("micro_f1", "micro_f1"): classification.MicroF1,
    ("matthews_correlation", "matthews_correlation"): classification.Matthews,
    ("multi_label", "micro_f1"): classification.MultiLabelMicroF1,
    ("multi_label", "macro_f1"): classification.MultiLabelMacroF1,
    ("multi_label", "subset_accuracy"): classification.SubsetAccuracy,
    ("pearson", "pearson"): regression.Pearson,
    ("spearman", "spearman"): lambda: regression.spearman_value,
    ("squad", "exact_match"): lambda: spans.EXACT_V1,
    ("squad", "f1"): lambda: spans.F1_V1,
    ("squad_v2", "exact"): lambda: spans.EXACT_V2,
    ("squad_v2", "f1"): lambda: spans.F1_V2,
    ("mean_squared_error", "mean_squared_error"): regression.MeanSquaredError,
    ("conlleval", "f1"): tagging.ChunkF1,
    ("conlleval", "precision"): tagging.ChunkPrecision,
    ("conlleval", "recall"): tagging.ChunkRecall,
    ("strict_iob2", "strict_f1"): lambda: tagging.ChunkF1(tagging.iob2_spans),
    ("tag_accuracy", "accuracy"): tagging.TagAccuracy,
}
"""By metric and score: the argument of `statistics.paired_bootstrap`, for lists aligned by example."""

LOWER_IS_BETTER = frozenset({"mean_squared_error"})
"""Scores for which lower is better; for all others, higher is better."""


def signed_score(name: str, score: float | None) -> float:
    """A number by which the best score is the greatest: minus infinity if undefined, and minus the score if lower is
    better."""
    if score is None:
        return -math.inf
    return -score if name in LOWER_IS_BETTER else float(score)


def find_metric(name: str) -> Metric:
    """The metric of that name.

    Raises:
        UsageError: there is none, with the nearest name.
    """
    if name in METRICS:
        return METRICS[name]
    near = get_close_matches(name, METRICS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"one of: {', '.join(METRICS)}"
    raise UsageError(f"unknown metric {name!r}; {hint}")


__all__ = ["LOWER_IS_BETTER", "METRICS", "RESAMPLED", "Additive", "Metric", "Scores", "find_metric", "signed_score"]
