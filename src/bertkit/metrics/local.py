"""The metrics as `evaluate.Metric` objects that are made here: nothing is downloaded, no script from elsewhere runs.

Own design over Hugging Face evaluate, whose `evaluate.load("accuracy")` fetches code from the Hub. Inputs are shaped as
the Hub's metrics of the same purpose take them; scores are fractions, as everywhere in bertkit. evaluate and datasets
are imported when a metric is first asked for: they take seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from bertkit.errors import DataError
from bertkit.metrics import METRICS, find_metric
from bertkit.metrics.base import Scores


def _by_id(items: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
    values = {str(item["id"]): read(item) for item in items}
    if len(values) < len(items):
        twice = Counter(str(item["id"]) for item in items).most_common(1)[0][0]
        raise DataError(f"question {twice} is there twice; expected one item per id")
    return values


def _answers(item: Mapping[str, Any]) -> list[str]:
    return list(item["answers"]["text"])


def _squad(predictions: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]) -> Scores:
    texts = _by_id(predictions, lambda item: item["prediction_text"])
    return METRICS["squad"](texts, _by_id(references, _answers))


def _squad_v2(
    predictions: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]], no_answer_threshold: float = 1.0
) -> Scores:
    texts = _by_id(predictions, lambda item: item["prediction_text"])
    null = _by_id(predictions, lambda item: item["no_answer_probability"])
    return METRICS["squad_v2"](texts, _by_id(references, _answers), null, no_answer_threshold)


_OF_ITEMS: dict[str, Callable[..., Scores]] = {"squad": _squad, "squad_v2": _squad_v2}
"""Metrics whose function takes mappings by question, where evaluate has lists of items."""
_NUMBERS, _SETS, _SENTENCES = ("pearson", "spearman"), ("multi_label",), ("conlleval", "strict_iob2")


def _features(name: str) -> Any:
    """The shapes that evaluate accepts, tried in turn; text first, since evaluate would read "1" as a number."""
    from datasets import Features, List, Value

    def both(feature: Any) -> Any:
        return Features({"predictions": feature, "references": feature})

    if name in _OF_ITEMS:
        prediction = {"id": Value("string"), "prediction_text": Value("string")}
        if name == "squad_v2":
            prediction["no_answer_probability"] = Value("float64")
        answers = {"text": List(Value("string")), "answer_start": List(Value("int64"))}
        return Features({"predictions": prediction, "references": {"id": Value("string"), "answers": answers}})
    if name in _NUMBERS:
        return both(Value("float64"))
    if name in _SENTENCES:
        return both(List(Value("string")))
    if name in _SETS:
        return [both(List(Value("string"))), both(List(Value("int64")))]
    return [both(Value("string")), both(Value("int64"))]


@cache
def metric_class(name: str) -> type[Any]:
    """The subclass of `evaluate.Metric` for a metric of METRICS.

    Raises:
        UsageError: there is no metric of that name.
    """
    import evaluate

    function = _OF_ITEMS.get(name, find_metric(name))

    class LocalMetric(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
        """A metric of bertkit behind evaluate's interface."""

        def _info(self) -> Any:
            return evaluate.MetricInfo(
                description=str(METRICS[name].__doc__),
                citation="",
                inputs_description="",
                features=_features(name),
            )

        def _compute(self, *, predictions: Any, references: Any, **options: Any) -> Scores:
            return function(list(predictions), list(references), **options)

    LocalMetric.__name__ = LocalMetric.__qualname__ = "".join(part.title() for part in name.split("_"))
    return LocalMetric


def local_metric(name: str) -> Any:
    """An `evaluate.Metric` that keeps what it is given in memory: `local_metric("accuracy").compute(predictions=...)`.

    Lists of label ids or names; numbers (pearson, spearman); lists of tags (conlleval, strict_iob2) or of labels
    (multi_label: names or ids, not zeros and ones); items `{"id", "prediction_text"}` and
    `{"id", "answers": {"text", "answer_start"}}` (squad; squad_v2 with "no_answer_probability" besides).

    Raises:
        UsageError: there is no metric of that name.
    """
    find_metric(name)
    return metric_class(name)(keep_in_memory=True)
