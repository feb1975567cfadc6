"""What a fine-tuned model gets right and wrong: by class, pair of classes, confidence and example.

The calibration error is that of Guo et al. 2017, arXiv:1706.04599; the rest is not from a paper. Computed from the
predictions of a labelled split; results.json contains the figures, predictions/ the examples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bertkit.files import finite, replacing
from bertkit.metrics.calibration import BINS, expected_calibration_error
from bertkit.metrics.per_class import class_scores, confusion
from bertkit.tasks.base import Prediction, Task
from bertkit.tasks.classification import TEMPERATURE, Classification
from bertkit.tasks.examples import ChoiceExample, Example, QuestionExample, SentenceExample, TaggedExample

MISTAKES = 20
"""Number of most confident mistakes that are listed."""


def split_report(task: Task, predictions: Sequence[Prediction], examples: Sequence[Any]) -> dict[str, Any]:
    """`classes`, and `confusion` for single labels, over the labelled examples; empty if there are none."""
    known = [pair for pair in zip(predictions, examples, strict=True) if task.gold(pair[1]) is not None]
    guesses = [task.classes(each.prediction) for each, _ in known]
    gold = [task.classes(task.gold(example)) for _, example in known]
    scores = class_scores(guesses, gold)
    if not scores:
        return {}
    found: dict[str, Any] = {"classes": scores}
    if isinstance(task, Classification):
        counts = confusion(
            [each.prediction for each, _ in known], [str(task.gold(one)) for _, one in known], task.labels.names
        )
        found["confusion"] = {"labels": list(task.labels.names), "counts": counts}
    return found


def calibration(
    task: Task, before: Sequence[Prediction], after: Sequence[Prediction], examples: Sequence[Any], tuned: Any
) -> dict[str, Any] | None:
    """The calibration error of a classifier as trained and at the tuned temperature; None for other tasks."""
    if not isinstance(task, Classification) or all(example.label is None for example in examples):
        return None
    found: dict[str, Any] = {"bins": BINS, "ece": expected_calibration_error(*task.probabilities(before, examples))}
    if TEMPERATURE in tuned:
        found["temperature"] = tuned[TEMPERATURE]
        found["ece_at_temperature"] = expected_calibration_error(*task.probabilities(after, examples))
    return found


def mistakes(task: Task, predictions: Sequence[Prediction], examples: Sequence[Any]) -> list[dict[str, Any]]:
    """The wrong predictions of a single-label classifier, highest probability first."""
    if not isinstance(task, Classification):
        return []
    pairs = zip(predictions, examples, strict=True)
    wrong = [(each, one) for each, one in pairs if one.label is not None and each.prediction != str(one.label)]
    wrong.sort(key=lambda pair: -pair[0].scores[pair[0].prediction])
    return [prediction_row(each, example) for each, example in wrong[:MISTAKES]]


def prediction_row(prediction: Prediction, example: Example) -> dict[str, Any]:
    """One line of predictions/TASK-SPLIT.jsonl: the prediction, the gold label if known, and the text."""
    return prediction.to_json() | _gold(example) | _text(example)


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        for row in rows:
            file.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False).encode() + b"\n")


def _gold(example: Example) -> dict[str, Any]:
    if isinstance(example, TaggedExample):
        return {} if example.tags is None else {"label": list(example.tags)}
    if isinstance(example, QuestionExample):
        known = bool(example.answers) or example.impossible
        return {"label": [answer.text for answer in example.answers]} if known else {}
    if example.label is None:
        return {}
    return {"label": list(example.label) if isinstance(example.label, tuple) else example.label}


def _text(example: Example) -> dict[str, Any]:
    """The example's text, without a question's context, which many questions share."""
    if isinstance(example, TaggedExample):
        return {"words": list(example.words)}
    if isinstance(example, QuestionExample):
        return {"question": example.question}
    if isinstance(example, ChoiceExample):
        return {"context": example.context, "question": example.question, "endings": list(example.endings)}
    if isinstance(example, SentenceExample):
        return {"texts": list(example.texts)}
    return {"text": example.text} | ({} if example.text_pair is None else {"text_pair": example.text_pair})
