"""`bertkit eval RUN --data F`: a fine-tuned model scored on a new labelled file of its own task.

Sibling predict.py predicts unlabelled examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bertkit.cli.console import console, figure, interval
from bertkit.cli.finetune import print_by_class, print_confusion
from bertkit.cli.generated_options import FromField, Options
from bertkit.cli.options import READING, Measuring, Metrics, option
from bertkit.visible import number_of


@dataclass(frozen=True)
class FileReadOptions(Options):
    """How the file is read if it differs from the training data, and its column names if they differ."""

    text: Annotated[str | None, option("--text", metavar="COL", help="Column of the text.")] = None
    text_pair: Annotated[str | None, option("--text-pair", metavar="COL", help="Column of the second text.")] = None
    label: Annotated[str | None, option("--label", metavar="COL", help="Column of the label.")] = None

    delimiter: Annotated[str | None, FromField(READING, "delimiter", "--delimiter CHAR")] = None
    encoding: Annotated[str | None, FromField(READING, "encoding", "--encoding NAME")] = None
    na: Annotated[list[str] | None, FromField(READING, "na", "--na VALUE,VALUE")] = None
    skip_bad_rows: Annotated[bool | None, FromField(READING, "skip_bad_rows")] = None

    @property
    def columns(self) -> dict[str, str]:
        """The columns that are named."""
        named = {"text": self.text, "text_pair": self.text_pair, "label": self.label}
        return {field: column for field, column in named.items() if column is not None}

    @property
    def reading(self) -> dict[str, Any]:
        """The given reading settings as plain data."""
        from bertkit.cli.options import recipe_overrides

        return {override.key: override.value for override in recipe_overrides(self)}


def data(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Fine-tuned model: a run directory, a model directory or a Hub id.")
    ],
    file: Annotated[
        Path,
        typer.Option(
            "--data",
            metavar="F",
            help="Labelled examples in a format that fine-tuning reads: .csv, .tsv, .jsonl, .parquet; CoNLL columns"
            " (tagging); SQuAD's .json (question answering); or hub:ORG/NAME[:CONFIG[:SPLIT]].",
        ),
    ],
    metric: Metrics = None,
    *,
    reading: FileReadOptions,
    common: Measuring,
) -> None:
    """Score a fine-tuned model on a new labelled file: `bertkit eval RUN --data new.csv`

    Scores have 95% intervals over other examples of the same kind. The thresholds and the temperature that fine-tuning
    stored with the model are used; nothing is tuned on the file.
    """
    from bertkit.cli.eval_tasks import eval_arguments, finish
    from bertkit.evaluation.own_data import NewData, evaluate_data

    new = NewData(file, reading.columns, tuple(metric or ()), reading.reading)
    evaluated = evaluate_data(eval_arguments(run, common), new, progress=console.progress)
    _print(evaluated.results)
    more = ("data", "examples", "confidence", "classes", "confusion", "calibration", "tuned", "skipped")
    finish(evaluated, common, more)


def _print(results: dict[str, Any]) -> None:
    """Scores with their intervals, and scores by class."""
    rows = [
        (task, name, figure(found["mean"]), interval(found["interval"]))
        for task, scores in results["tasks"].items()
        for name, found in scores.items()
    ]
    title = f"{results['data']}: {number_of(results['examples'], 'example')}"
    console.table(["task", "metric", "score", f"{results['confidence']:.0%} interval"], rows, title=title)
    for classes in results.get("classes", {}).values():
        print_by_class(classes, title="by class")
    for confusion in results.get("confusion", {}).values():
        print_confusion(confusion, title="confusion")
    for reason, count in results.get("skipped", {}).get("data", {}).items():
        console.line(f"{number_of(count, 'row')} left out: {reason}")
    for found in results.get("calibration", {}).values():
        error = found.get("ece_at_temperature", found.get("ece"))
        console.line(f"calibration error {error:.3f}")
