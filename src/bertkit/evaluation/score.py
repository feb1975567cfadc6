"""Scores saved predictions against gold labels, without a model.

File formats: those of GLUE's server (`index`, `prediction`), SQuAD's scripts (`predictions.json`) and conlleval
(columns, with the prediction last), and bertkit's own JSON Lines. Examples are matched by id, and by position only if
there are no ids. Sibling runs_diff.py compares two such files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.run import single_score
from bertkit.evaluation.submission import HEADER
from bertkit.finetuning.data import build_task
from bertkit.finetuning.recipe import FinetuneRecipe, resolved
from bertkit.models.families.bert import BertConfig
from bertkit.tasks.base import Prediction, Task
from bertkit.tasks.catalogue import TaskSpec, find_task
from bertkit.tasks.examples import ChoiceExample, Example, QuestionExample, TaggedExample
from bertkit.tasks.readers.columns import DOCUMENT_START
from bertkit.tasks.readers.common import json_file, json_rows, known_label, number_in, numbered_lines, tab_rows
from bertkit.tasks.readers.load import READERS
from bertkit.tasks.span import THRESHOLD

_FINAL: Mapping[str, float] = {THRESHOLD: 0.0}
"""Stored with a predicted answer: the answer is final, no threshold has to be chosen."""
_LISTED = {"tagging": "tags, one per word", "multi_label": "labels"}


def score_file(task: str, predictions: Path, gold: Path, split: str = "dev") -> dict[str, Any]:
    """The scores of a file of predictions, as the JSON document of `bertkit eval`.

    Args:
        task: a published task's name.
        predictions: `.jsonl` of `{"id", "prediction"}`, `.tsv` as for GLUE's server, `.json` of answers by id, or
            conlleval's columns.
        gold: the task's official file of the split, with labels.
        split: the gold file's split, if its format depends on it.

    Raises:
        UsageError: no such task, or one whose predictions are not saved.
        DataError: an invalid file, gold without labels, or examples that differ from the gold file's.
    """
    spec = find_task(task)
    _require_predictions(spec)
    examples = READERS[spec.layout](gold, spec, split).examples
    if not any(is_labelled(example) for example in examples):
        raise DataError(f"{gold}: has no labels; give the labelled file of a split with --gold")
    predicted = matched(read_predictions(predictions, spec), examples, source=str(predictions))
    recipe = resolved(FinetuneRecipe(name=spec.name, task=spec.name, model="none"))
    scores = scoring_task(recipe, examples, predicted).score(predicted, examples)
    return {
        "suite": spec.name,
        "model": None,
        "tasks": {spec.name: {name: single_score(value) for name, value in scores.items()}},
        "average": scores[spec.primary],
        "examples": len(examples),
    }


def scoring_task(recipe: FinetuneRecipe, examples: Sequence[Example], predictions: Sequence[Prediction]) -> Task:
    """The recipe's task, for its metrics; if it names no labels, they are those that occur or have a score."""
    names = recipe.spec.labels
    if names is None:
        found = [getattr(example, "label", getattr(example, "tags", None)) for example in examples]
        found += [each.prediction for each in predictions]
        if recipe.spec.kind in ("classification", "multi_label"):
            found += [list(each.scores) for each in predictions[:1] if isinstance(each.scores, Mapping)]
        names = tuple(sorted({name for each in found for name in _names(each)}))
    # Without the contents of a config.json, the labels keep this order.
    return build_task(recipe, examples, names, BertConfig(), {}, Path())


def _names(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return [value] if isinstance(value, str) else []


def read_predictions(path: Path, spec: TaskSpec) -> dict[str, Prediction]:
    """Predictions by id; by position from 0 if the file has no ids.

    Raises:
        UsageError: the task is to compute vectors.
        DataError: an invalid line, a duplicate id, or a label that the task does not have.
    """
    _require_predictions(spec)
    found: dict[str, Prediction] = {}
    for where, name, value, scores in _rows(path, spec):
        if name in found:
            raise DataError(f"{where}: example {name!r} is predicted twice")
        if spec.kind == "span" and not (isinstance(scores, dict) and {"text", "null_odds"} <= scores.keys()):
            scores = _FINAL
        found[name] = Prediction(name, _checked(value, spec, where), scores)
    if not found:
        raise DataError(f"{path}: contains no predictions")
    return found


def _require_predictions(spec: TaskSpec) -> None:
    """Raise UsageError if runs of this task save no predictions."""
    if spec.kind == "embedding":
        raise UsageError(
            f"{spec.name}: trains vectors, which saved predictions do not contain; `bertkit eval sts`, `pairs`,"
            " `triplets`, `clustering` and `retrieval` score a model's"
        )


def _rows(path: Path, spec: TaskSpec) -> Iterator[tuple[str, str, Any, Any]]:
    """Position, id, prediction and scores of each line."""
    if path.suffix == ".json":
        for name, text in json_file(path).items():
            yield f"{path}, {name}", name, text, None
    elif path.suffix == ".jsonl":
        for number, (line, record) in enumerate(json_rows(path)):
            where = f"{path}, line {line}"
            if "prediction" not in record:
                raise DataError(f"{where}: no field 'prediction'; there are: {', '.join(record) or 'none'}")
            yield where, str(record.get("id", number)), record["prediction"], record.get("scores")
    elif spec.kind == "tagging":
        yield from _sentences(path)
    else:
        rows = tab_rows(path)
        first = next(rows, (0, []))[1]
        if "\t".join(first) != HEADER:
            raise DataError(
                f"{path}, line 1: {' '.join(first)[:60]!r}; expected GLUE's header {HEADER!r}, or a .jsonl of id and"
                " prediction"
            )
        for line, fields in rows:
            where = f"{path}, line {line}"
            if len(fields) != 2:
                raise DataError(f"{where}: {len(fields)} fields, expected an index, a tab and a prediction")
            yield where, fields[0], fields[1], None


def _sentences(path: Path) -> Iterator[tuple[str, str, Any, Any]]:
    """conlleval's columns: the last one of every line is the predicted tag."""
    tags: list[str] = []
    number = begun = 0
    for line, text in numbered_lines(path):
        columns = text.split()
        if columns and columns[0] != DOCUMENT_START:
            begun = begun if tags else line
            tags.append(columns[-1])
        elif tags:
            yield f"{path}, line {begun}", str(number), tags, None
            tags, number = [], number + 1
    if tags:
        yield f"{path}, line {begun}", str(number), tags, None


def _checked(value: Any, spec: TaskSpec, where: str) -> Any:
    """A prediction in the form that the task's metrics expect."""
    if spec.kind == "regression":
        return number_in(value, where)
    if spec.kind == "classification":
        return known_label(value if isinstance(value, str) else str(value), spec.labels, where)
    if spec.kind == "choice":
        if isinstance(value, bool) or not re.fullmatch("[0-9]{1,9}", str(value)):
            raise DataError(f"{where}: prediction {value!r:.60}, expected the number of an ending, from 0")
        return int(value)
    if spec.kind == "span":
        if not isinstance(value, str):
            raise DataError(f"{where}: prediction {value!r:.60}, expected text, empty for no answer")
        return value
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise DataError(f"{where}: prediction {value!r:.60}, expected a list of {_LISTED[spec.kind]}")
    if spec.kind == "multi_label":
        value = [known_label(each, spec.labels, where) for each in value]
    return value


def matched(found: Mapping[str, Prediction], examples: Sequence[Example], *, source: str) -> list[Prediction]:
    """The prediction of every example, in the examples' order.

    Raises:
        DataError: examples without a prediction, predictions without an example, a number of tags that differs from the
            number of words, or an ending that does not exist.
    """
    ids = [example.id for example in examples]
    lacking = [name for name in ids if name not in found]
    foreign = sorted(found.keys() - set(ids))
    if lacking or foreign:
        parts = [f"{len(lacking)} of {len(ids)} examples have no prediction (such as {lacking[0]})"] if lacking else []
        parts += [f"{len(foreign)} predictions match no example (such as {foreign[0]})"] if foreign else []
        raise DataError(f"{source}: {', and '.join(parts)}; are these predictions of this split?")
    for example in examples:
        predicted = found[example.id].prediction
        if isinstance(example, TaggedExample) and len(predicted) != len(example.words):
            raise DataError(
                f"{source}: sentence {example.id} has {len(example.words)} words and {len(predicted)} predicted tags;"
                " every word needs one, O where it was cut"
            )
        if isinstance(example, ChoiceExample) and predicted >= len(example.endings):
            raise DataError(
                f"{source}: example {example.id} has {len(example.endings)} endings, numbered from 0, and the predicted"
                f" one is {predicted}"
            )
    return [found[name] for name in ids]


def is_labelled(example: Example) -> bool:
    """Whether the example's answer is known."""
    if isinstance(example, QuestionExample):
        return bool(example.answers) or example.impossible
    return (example.tags if isinstance(example, TaggedExample) else example.label) is not None
