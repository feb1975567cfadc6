"""Scores a fine-tuned model on a new labelled file of its own task: `bertkit eval RUN --data new.csv`.

Efron and Tibshirani 1993, An Introduction to the Bootstrap, for each score's percentile interval over other examples of
the same kind (bertkit.metrics.statistics). Thresholds and the temperature that fine-tuning stored with the model are
used unchanged: nothing is tuned on the new file. Sibling tasks.py evaluates on published tasks, and fine-tunes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.run import EvalArguments, EvaluationResult, measure_or_reuse, single_score
from bertkit.evaluation.runs_diff import reference_of, resampled
from bertkit.evaluation.score import is_labelled
from bertkit.files import joint_sha256, json_sha256, sha256_of
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.label_counts import skipped_counts, write_skipped
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.report import calibration, mistakes, prediction_row, split_report, write_lines
from bertkit.inference.predict import Predictor
from bertkit.metrics.modules import load_metric
from bertkit.metrics.statistics import bootstrap_interval
from bertkit.models.files.model_files import config_hash, weights_hash
from bertkit.progress import Progress, silent_progress
from bertkit.recipe.resolve import overrides_of, with_overrides
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.run.finished import CONFIG_FINGERPRINT
from bertkit.tasks.base import Prediction, Task
from bertkit.tasks.classification import TEMPERATURE, TextTask
from bertkit.tasks.examples import Split, TaggedExample, match_label_case
from bertkit.tasks.readers import Columns, read_own
from bertkit.tasks.readers.hub_table import table_file
from bertkit.tasks.readers.load import READERS
from bertkit.tasks.readers.read_options import SkippedRows, TableReadOptions
from bertkit.tasks.readers.table import TABLE_KINDS, rows_or_bad
from bertkit.tasks.span import THRESHOLD, Span
from bertkit.text.lines import ending
from bertkit.text.tokenizer_files import load_tokenizer

SUITE = "data"
PREDICTIONS, MISTAKES = "predictions", "mistakes"
CONFIDENCE = 0.95
_SHOWN = 8
"""Maximum number of labels listed in an error."""
_SHOWN_CHARACTERS = 60
"""Maximum length of a label listed in an error: a column of texts may have been taken for that of the labels."""


@dataclass(frozen=True)
class NewData:
    """A labelled file.

    Attributes:
        path: a file in a format that fine-tuning on this kind of task reads, or a table of the Hub.
        columns: columns named on the command line, by their field of `Columns`.
        metrics: additional metrics to report: names of `evaluate`, or scripts.
        reading: settings of `TableReadOptions` from the command line, which replace those of the training data.
    """

    path: Path
    columns: Mapping[str, Any]
    metrics: tuple[str, ...] = ()
    reading: Mapping[str, Any] = field(default_factory=dict)


def evaluate_data(arguments: EvalArguments, data: NewData, *, progress: Progress = silent_progress) -> EvaluationResult:
    """Predict the file's examples, score them, and write a run; or find the finished run of the same evaluation.

    Raises:
        UsageError: the kind of task is not read from such a file.
        DataError: no such file or model, missing columns, examples without a label, or labels unknown to the model.
    """
    source = str(data.path)
    data = replace(data, path=table_file(source, "test", offline=arguments.offline))
    if not data.path.is_file():
        raise DataError(f"{data.path}: {'is a directory; name a file in it' if data.path.is_dir() else 'no such file'}")
    predictor = Predictor.load(arguments.model, arguments.engine(), offline=arguments.offline)
    task = predictor.task
    split = read_labelled(predictor.recipe, data.path, data.columns, data.reading)
    examples = with_known_labels(split.examples, task, str(data.path), arguments.model)
    task.additional = tuple(load_metric(name, offline=arguments.offline) for name in data.metrics)
    task.check_additional(examples)

    def compute(run: RunDirectory) -> dict[str, Any]:
        known = replace(split, examples=examples)
        scored = _scored(run, predictor, data.path, known, progress)
        return {"suite": SUITE, "model": arguments.model, **scored, "data": source}

    return measure_or_reuse(_identity(arguments, predictor, data), arguments, compute)


def _scored(run: RunDirectory, predictor: Predictor, path: Path, split: Split, progress: Progress) -> dict[str, Any]:
    """Predict the file's examples, write the predictions into the run, and return the scores for its results.json."""
    task, spec, examples = predictor.task, predictor.recipe.spec, split.examples
    predictions = predictor(examples, progress=progress, label=f"{spec.name}, {path.name}")
    predictions = _decided(task, predictions, examples, predictor.stored)
    tasks = {spec.name: scores_with_intervals(predictor.recipe, task, predictions, examples)}
    results: dict[str, Any] = {
        "tasks": tasks,
        "average": tasks[spec.name][spec.primary]["mean"],
        "data": str(path),
        "examples": len(examples),
        "confidence": CONFIDENCE,
        **({"notes": split.notes} if split.notes else {}),
        **({"skipped": skipped_counts({SUITE: split})} if split.skipped else {}),
        **({"tuned": predictor.stored} if predictor.stored else {}),
        **{part: {SUITE: value} for part, value in split_report(task, predictions, examples).items()},
    }
    calibrated = calibration(task, predictions, predictions, examples, {})
    if calibrated is not None:
        if TEMPERATURE in predictor.stored:
            calibrated["temperature"] = predictor.stored[TEMPERATURE]
            calibrated["ece_at_temperature"] = calibrated.pop("ece")
        results["calibration"] = {SUITE: calibrated}
    rows = (prediction_row(*pair) for pair in zip(predictions, examples, strict=True))
    write_lines(run.path / PREDICTIONS / f"{spec.name}-{SUITE}.jsonl", rows)
    if wrong := mistakes(task, predictions, examples):
        write_lines(run.path / MISTAKES / f"{spec.name}-{SUITE}.jsonl", wrong)
    write_skipped(run.path, spec.name, {SUITE: split})
    return results


def _decided(
    task: Task, predictions: list[Prediction], examples: Sequence[Any], stored: Mapping[str, Any]
) -> list[Prediction]:
    """Answers if the model stores no threshold: no answer is predicted if that has the higher score."""
    if not isinstance(task, Span) or THRESHOLD in stored:
        return predictions
    if task.may_be_impossible:
        return task.final(predictions, {THRESHOLD: 0.0})
    if any(example.impossible for example in examples):
        impossible = sum(example.impossible for example in examples)
        raise DataError(
            f"{impossible} of {len(examples)} questions have no answer, but all questions that the model was trained on"
            " have one; leave them out, or fine-tune on data with such questions"
        )
    return predictions


def read_labelled(
    recipe: FinetuneRecipe, path: Path, given: Mapping[str, Any], reading: Mapping[str, Any] | None = None
) -> Split:
    """The examples of a file, read like the task's own data.

    For a user's own task, the columns are those of its training files. For a published task, the file is in its
    official format, or a table (.csv, .parquet, .jsonl) with the official column names or `text`, `text_pair` and
    `label`.

    Args:
        recipe: the model's recipe.
        path: the file.
        given: columns named by the user, by their field of `Columns`.
        reading: settings of `TableReadOptions` named by the user.

    Raises:
        UsageError: a file suffix that this kind of task is not read from, or settings that are wrong or have no effect.
        DataError: a missing column, an example without a label, or another error in the file.
    """
    spec, kind = recipe.spec, recipe.spec.kind
    usual = recipe.task.reading if isinstance(recipe.task, CustomTask) else TableReadOptions()
    read_as = with_overrides(usual, overrides_of(dict(reading or {})))
    if isinstance(recipe.task, CustomTask):
        columns = recipe.task.columns.model_copy(update={"group": None, **given})
        if columns.id is not None and ending(path) in TABLE_KINDS and columns.id not in _first_row(path, read_as):
            columns = columns.model_copy(update={"id": None})  # ids only name the examples; as in `predict`
        split = read_own(path, kind, columns, read_as)
    elif kind in ("tagging", "span") or given:
        split = read_own(path, kind, Columns.model_validate(dict(given)), read_as)
    elif kind != "choice" and _is_plain_table(path, read_as):
        split = read_own(path, kind, _table_columns(recipe, path, read_as), read_as)
    else:
        read_as.only(path)
        split = READERS[spec.layout](path, spec, "dev")
    without = [example.id for example in split.examples if not is_labelled(example)]
    if without:
        raise DataError(
            f"{path}: {len(without)} of {len(split.examples)} examples have no label (such as {without[0]}); name the"
            " column with --label, or predict them with `bertkit predict`"
        )
    return split


def _is_plain_table(path: Path, reading: TableReadOptions) -> bool:
    """Whether a file is a table, not an official file; MNLI's and SNLI's JSON Lines have a field `gold_label`."""
    return ending(path) in (".csv", ".parquet", ".jsonl") and "gold_label" not in _first_row(path, reading)


def _first_row(path: Path, reading: TableReadOptions) -> dict[str, Any]:
    rows = rows_or_bad(path, reading, SkippedRows(skip_bad=reading.skip_bad_rows))
    return next((row for _, row in rows if row is not None), {})


def _table_columns(recipe: FinetuneRecipe, path: Path, reading: TableReadOptions) -> Columns:
    """The columns of a table for a published task: of each column's usual names, the first that it has."""
    spec, row = recipe.spec, _first_row(path, reading)
    texts, pairs, labels = ["text"], ["text_pair"], ["label"]
    if spec.columns is not None:
        texts, pairs = [*spec.columns.text, *texts], [*spec.columns.text_pair, *pairs]
        labels = [*spec.columns.label, *labels]
    if spec.hub is not None:
        first, *second = spec.hub.columns
        texts, pairs, labels = [first, *texts], [*second, *pairs], [spec.hub.label, *labels]
    is_pair = len(pairs) > 1

    def named(names: Sequence[str]) -> str:
        return next((name for name in names if name in row), names[-1])

    return Columns(text=named(texts), text_pair=named(pairs) if is_pair else None, label=named(labels))


def _labels_of(example: Any) -> tuple[str, ...]:
    """The names of an example's labels or tags."""
    given = example.tags if isinstance(example, TaggedExample) else getattr(example, "label", None)
    if isinstance(given, str):
        return (given,)
    return tuple(each for each in given if isinstance(each, str)) if isinstance(given, tuple) else ()


def with_known_labels(examples: Sequence[Any], task: Task, source: str, model: str) -> list[Any]:
    """The examples with their labels as the model spells them, ignoring case.

    Raises:
        DataError: there are labels that the model does not have; all are listed.
    """
    names = task.labels.names
    found = match_label_case(examples, names)
    unknown: dict[str, list[str]] = {}
    for example in found:
        for label in _labels_of(example):
            if label not in names:
                unknown.setdefault(label, []).append(example.id)
    if unknown:
        shown = ", ".join(
            f"{label!r:.{_SHOWN_CHARACTERS}} ({'once, in' if len(ids) == 1 else f'{len(ids)} times, first in'} example"
            f" {ids[0]})"
            for label, ids in list(unknown.items())[:_SHOWN]
        )
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        column = " name their column with --label," if isinstance(task, TextTask) else ""
        raise DataError(
            f"{source}: labels that {model} does not have: {shown}{more}; it has"
            f" {', '.join(map(repr, names[:_SHOWN]))}{', ...' if len(names) > _SHOWN else ''}; rename them in the file,"
            f"{column} or fine-tune with examples of them"
        )
    return found


def scores_with_intervals(
    recipe: FinetuneRecipe, task: Task, predictions: Sequence[Prediction], examples: Sequence[Any]
) -> dict[str, dict[str, Any]]:
    """Each metric as in results.json, with `interval`: its percentile interval or None."""
    guesses = [each.prediction for each in predictions]
    references = [reference_of(example) for example in examples]
    found = {}
    for name, value in task.score(predictions, examples).items():
        interval = None
        if name in task.metrics and value is not None:
            try:
                metric = resampled(task, recipe.spec, name)
            except UsageError:
                metric = None
            if metric is not None:
                interval = bootstrap_interval(guesses, references, metric, confidence=CONFIDENCE)
        found[name] = {**single_score(value), "interval": None if interval is None else list(interval)}
    return found


def _identity(arguments: EvalArguments, predictor: Predictor, data: NewData) -> RunIdentity:
    """The record, with the hash of everything that determines the result."""
    fingerprints = {
        "data": sha256_of(data.path),
        "tokenizer": load_tokenizer(predictor.directory, offline=arguments.offline).fingerprint,
        "model": weights_hash(predictor.directory),
    }
    # The recipe says how the model reads and decides; metrics may be scripts that have changed.
    recipe = [each.model_dump(mode="json") for each in (predictor.recipe, predictor.recipe.spec)]
    config = joint_sha256([config_hash(predictor.directory), json_sha256(recipe)])
    metrics = {each.name: each.fingerprint for each in predictor.task.additional}
    settings: dict[str, Any] = {"columns": dict(data.columns), "metrics": list(data.metrics)}
    if data.reading:
        settings["reading"] = dict(data.reading)
    return RunIdentity.of_measurement(
        "eval",
        SUITE,
        {"kind": "eval", "suite": SUITE, "model": arguments.model, "data": str(data.path), **settings},
        {"kind": "eval", "name": SUITE, **settings, **fingerprints, **({"metrics": metrics} if metrics else {})},
        seed=0,
        command=arguments.command,
        fingerprints={**fingerprints, CONFIG_FINGERPRINT: config},
    )
