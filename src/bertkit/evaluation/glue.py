"""GLUE: every task whose data is available, the averages that papers report, and the files for the server.

Wang et al. 2019, GLUE, arXiv:1804.07461, section 3 (tasks and score); Devlin et al. 2019, BERT, arXiv:1810.04805, table
1. There is no single average: BERT's counts MNLI twice and leaves out WNLI, the server's includes WNLI and means of
metrics, ELECTRA's has eight tasks. Each has a name, and lists the columns it was computed over if some are missing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.plan import MISMATCHED, TaskEvaluation
from bertkit.evaluation.run import EvaluationResult
from bertkit.evaluation.submission import check_submission, glue_file, glue_tsv, write_glue_submission
from bertkit.evaluation.tasks import PREDICTIONS, Measured, Table, evaluate_tasks
from bertkit.finetuning.report import prediction_row, write_lines
from bertkit.inference.predict import Predictor
from bertkit.progress import Progress, silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.tasks.catalogue import GLUE, TASKS, TaskSpec, find_task
from bertkit.tasks.readers import load_split
from bertkit.tasks.readers.common import field, json_rows

log = logging.getLogger(__name__)

SUITE = "glue"
TEST_SPLITS = ("test", "test_mm")
SUBMISSION = "submission"
NOT_PREDICTED = "the test split is not predicted"
"""Why a file is missing from a submission although nothing is wrong."""
_DIAGNOSTIC = "ax"

Column = tuple[tuple[str, str], ...]
"""The scores, by task and metric, whose mean is one column of an average."""


def _one(task: str, metric: str = "accuracy") -> Column:
    return ((task, metric),)


@dataclass(frozen=True)
class Average:
    """A definition of an average.

    Attributes:
        title: its name in tables.
        columns: the averaged scores, by the column's name.
        source: who uses it.
    """

    title: str
    columns: Mapping[str, Column]
    source: str


_SAME: dict[str, Column] = {
    "cola": _one("cola", "matthews_correlation"),
    "sst2": _one("sst2"),
    "qnli": _one("qnli"),
    "rte": _one("rte"),
}
AVERAGES: dict[str, Average] = {
    "paper": Average(
        "average of BERT's table",
        {
            "mnli": _one("mnli"),
            MISMATCHED: _one(MISMATCHED),
            "qqp": _one("qqp", "f1"),
            "stsb": _one("stsb", "spearman"),
            "mrpc": _one("mrpc", "f1"),
            **_SAME,
        },
        "BERT, table 1: nine columns, both halves of MNLI, one metric per task, without WNLI",
    ),
    "server": Average(
        "score of the GLUE server",
        {
            "mnli": (*_one("mnli"), *_one(MISMATCHED)),
            "qqp": (*_one("qqp", "f1"), *_one("qqp")),
            "stsb": (*_one("stsb", "pearson"), *_one("stsb", "spearman")),
            "mrpc": (*_one("mrpc", "f1"), *_one("mrpc")),
            "wnli": _one("wnli"),
            **_SAME,
        },
        "GLUE, section 3: nine tasks including WNLI; metrics of a task and both halves of MNLI are averaged first",
    ),
    "eight": Average(
        "average of ELECTRA's dev table",
        {
            "mnli": _one("mnli"),
            "qqp": _one("qqp"),
            "stsb": _one("stsb", "spearman"),
            "mrpc": _one("mrpc"),
            **_SAME,
        },
        "ELECTRA, dev: eight tasks, MNLI matched, accuracy for MRPC and QQP, Spearman for STS-B, without WNLI",
    ),
}
"""Averages by name; `paper` is the document's `average`."""

Values = Mapping[str, Mapping[str, float | None]]


def average_of(average: Average, values: Values, only: Collection[str] | None = None) -> dict[str, Any]:
    """The mean over the available columns.

    Args:
        average: the definition.
        values: scores by task and metric.
        only: restrict to these columns; None for all.

    Returns:
        `{"value", "over": [column, ...], "lacking": [column, ...], "definition"}`; value None if there is none.
    """
    columns: dict[str, float] = {}
    for name, parts in average.columns.items():
        found = [values.get(task, {}).get(metric) for task, metric in parts]
        known = [each for each in found if each is not None]
        if len(known) == len(parts) and (only is None or name in only):
            columns[name] = sum(known) / len(known)
    return {
        "value": sum(columns.values()) / len(columns) if columns else None,
        "over": list(columns),
        "lacking": [name for name in average.columns if name not in columns],
        "definition": average.source,
    }


def glue_tasks(names: Sequence[str] | None = None) -> tuple[TaskSpec, ...]:
    """The tasks with these names; all nine if None.

    Raises:
        UsageError: a name is not a task of GLUE.
    """
    specs = [find_task(name) for name in (GLUE if names is None else names)]
    others = [spec.name for spec in specs if spec.name not in GLUE]
    if others or not specs:
        raise UsageError(f"--tasks: {', '.join(others) or 'none given'}; the tasks of GLUE are {', '.join(GLUE)}")
    return tuple(TASKS[name] for name in GLUE if name in {spec.name for spec in specs})


def evaluate_glue(evaluation: TaskEvaluation, *, progress: Progress = silent_progress) -> EvaluationResult:
    """Evaluate on GLUE, and write results.json and the submission.

    Args:
        evaluation: with GLUE's suite name and splits to predict.
        progress: the display.

    Raises:
        BertkitError: see `evaluate_tasks`.
    """
    whole = replace(evaluation, suite=SUITE, predict=TEST_SPLITS)

    def finish(run: RunDirectory, measured: Mapping[str, Measured], table: Table) -> dict[str, Any]:
        values = {task: {name: each["mean"] for name, each in metrics.items()} for task, metrics in table.items()}
        averages = {name: average_of(average, values) for name, average in AVERAGES.items()}
        if "mnli" in measured:
            _predict_diagnostic(whole, measured["mnli"].model, run)
        return {
            "average": averages["paper"]["value"],
            "averages": averages,
            "submission": write_submission(run.path),
        }

    return evaluate_tasks(whole, progress=progress, finish=finish)


def _predict_diagnostic(evaluation: TaskEvaluation, model: Path, run: RunDirectory) -> None:
    """Predict the diagnostic set with the MNLI model, if the set is available."""
    arguments = evaluation.arguments
    try:
        split = load_split(_DIAGNOSTIC, "test", evaluation.data_dir, offline=arguments.offline)
    except DataError as error:
        log.warning("%s is not predicted: %s", _DIAGNOSTIC, error)
        return
    predictor = Predictor.load(str(model), arguments.engine(), spec=TASKS["mnli"], offline=arguments.offline)
    pairs = zip(predictor(split.examples), split.examples, strict=True)
    write_lines(run.path / PREDICTIONS / f"{_DIAGNOSTIC}-test.jsonl", [prediction_row(*pair) for pair in pairs])


def write_submission(run: Path) -> dict[str, Any]:
    """Write RUN/submission from RUN/predictions: one file per completely predicted test split, and the zip.

    Returns:
        `{"zip": path below the run or None, "files": [name, ...], "missing": {name: reason}}`.
    """
    predictions: dict[str, list[Any]] = {}
    missing: dict[str, str] = {}
    for task in (*GLUE, _DIAGNOSTIC):
        for split in (each for each in TASKS[task].splits if each in TEST_SPLITS):
            file = glue_file(task, split)
            saved = run / PREDICTIONS / f"{task}-{split}.jsonl"
            if not saved.is_file():
                missing[file.name] = NOT_PREDICTED
                continue
            try:
                values = [field(row, "prediction", f"{saved}, line {line}") for line, row in json_rows(saved)]
                glue_tsv(file, values)
            except DataError as error:
                missing[file.name] = str(error)
                continue
            predictions[file.name] = values
    if not predictions:
        return {"zip": None, "files": [], "missing": missing}
    path = write_glue_submission(run / SUBMISSION, predictions)
    errors = [error for error in check_submission(path) if error.file.removesuffix(".tsv") not in missing]
    assert not errors, errors
    return {"zip": str(path.relative_to(run)), "files": list(predictions), "missing": missing}
