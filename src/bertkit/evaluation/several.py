"""An evaluation or a probe of one model, applied to several: what a run has learned by when, or how models differ.

Each model is measured in a run of its own, which is reused like any other. Another run has their tables one below the
other, with the columns `model`, `step`, `tokens` and, if they were counted, `words` (of training) in front, and the
main figures by training. Sibling babylm/checkpoints.py does this for BabyLM's fast samples; probing/several.py is for
probes, speed/ times models together.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.evaluation import blimp, surprisal
from bertkit.evaluation.language_diff import FIGURES, remedy
from bertkit.evaluation.loaded_model import each_name, short_name
from bertkit.evaluation.plots import height_with_legend, lines, new_figure, plain
from bertkit.evaluation.run import (
    EvalArguments,
    EvaluationResult,
    joint_fingerprint,
    measure_or_reuse,
    single_score,
)
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.settings import Settings
from bertkit.tables import write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

Columns = dict[str, list[Any]]
TABLES = "tables"
SCORES, PHENOMENA = "scores", "phenomena"


@dataclass(frozen=True)
class Curve:
    """A figure by model, from the column `value` of a table: a line for each value of the column `line`, in a panel for
    each value of the column `panel`, if there is one; `panel_is_value`: panels have different quantities, which these
    name."""

    table: str
    value: str
    title: str
    line: str = "layer"
    panel: str | None = None
    panel_is_value: bool = False


def evaluate_each(
    arguments: EvalArguments,
    models: Sequence[str],
    settings: Settings,
    evaluate: Callable[[EvalArguments], EvaluationResult],
) -> EvaluationResult:
    """Evaluate every model and write the run with the results of all; a single model has only its own.

    Args:
        arguments: `run_dir` is that of the results of all.
        models: names as for `load_models`.
        settings: of the suite.
        evaluate: evaluates one model and writes a run.

    Raises:
        UsageError: a model is given twice, or as of the suite.
        DataError: as of the suite.
    """
    names = each_name(models)
    if len(names) == 1:
        return evaluate(replace(arguments, model=names[0]))
    found = []
    for number, name in enumerate(names, start=1):
        log.info("model %d of %d: %s", number, len(names), name)
        found.append(evaluate(replace(arguments, model=name, run_dir=None)))
    suite, chosen = f"{found[0].results['suite']}-models", settings.model_dump(mode="json")
    records = [each.run.record for each in found]
    identity = RunIdentity.of_measurement(
        "eval",
        suite,
        {"kind": "eval", "suite": suite, "models": names, "settings": chosen},
        {"kind": "eval", "name": suite, "settings": chosen, "runs": [each["what_hash"] for each in records]},
        seed=records[0]["seed"],
        command=arguments.command,
        fingerprints={
            key: joint_fingerprint([each["fingerprints"][key] for each in records])
            for key in records[0]["fingerprints"]
        },
    )

    def compute(run: RunDirectory) -> dict[str, Any]:
        labels = [_label(name) for name in names]
        labels = labels if len(set(labels)) == len(names) else names
        rows = training_columns(labels, [each.results["trained"] for each in found])
        figures = [_figures_of(each.results) for each in found]
        _write(run, rows, found, figures)
        return {
            "suite": suite,
            "model": ", ".join(names),
            "tasks": {
                name: {key: single_score(value) for key, value in own.items()}
                for name, own in zip(names, figures, strict=True)
            },
            "average": None,
            "models": [
                row | {"name": name, "average": each.results["average"], "run": str(each.run.path)}
                for name, row, each in zip(names, rows, found, strict=True)
            ],
            "warnings": _warnings(found),
            "protocol": found[0].results["protocol"],
        }

    return measure_or_reuse(identity, arguments, compute)


def _label(name: str) -> str:
    """A short name of a model, as of `LoadedModel`."""
    run, at, which = name.rpartition("@")
    return f"{short_name(run)}@{which}" if at else short_name(name)


def training_columns(labels: Sequence[str], trained: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """The columns `model`, `step`, `tokens` and, if a run has counted them, `words` of each model."""
    known = [each or {} for each in trained]
    words = ["words"] if any("words" in each for each in known) else []
    return [
        {"model": label, "step": own.get("steps"), "tokens": own.get("tokens"), **{key: own.get(key) for key in words}}
        for label, own in zip(labels, known, strict=True)
    ]


def _figures_of(results: Mapping[str, Any]) -> dict[str, float | None]:
    """The main figures of a model by name: the averages of minimal pairs, or all figures of the text."""
    if results["suite"] == blimp.SUITE:
        return {**results["averages"], "standard_error": results["standard_error"]}
    tasks = results["tasks"]
    return {
        name if len(tasks) == 1 else f"{task}/{name}": figure["mean"]
        for task, figures in tasks.items()
        for name, figure in figures.items()
    }


def _warnings(found: Sequence[EvaluationResult]) -> list[str]:
    """Why figures of these models may not be comparable."""
    first, task = found[0].results, next(iter(found[0].results["tasks"]))
    rules = list(dict.fromkeys(str(each.results["protocol"].get("rule")) for each in found))
    warnings = []
    if first["suite"] == surprisal.SUITE and len(rules) > 1:
        warnings.append(
            f"the models are read by different rules ({', '.join(rules)}), so their surprisals are different quantities"
        )
    if task in FIGURES and len({each.run.record["fingerprints"]["tokenizer"] for each in found}) > 1:
        per_token = [each.name for each in FIGURES[task] if each.is_per_token and each.name in first["tasks"][task]]
        warnings.append(f"the models' tokenizers differ, so {', '.join(per_token)} cannot be compared{remedy(task)}")
    return warnings


def _write(
    run: RunDirectory,
    rows: Sequence[dict[str, Any]],
    found: Sequence[EvaluationResult],
    figures: Sequence[dict[str, float | None]],
) -> None:
    """Write the tables of all models, and the main figures."""
    from bertkit.run.figure_files import save

    tables = joined_tables(rows, [each.run.path for each in found])
    tables[SCORES] = as_columns([_in_front(row, own) for row, own in zip(rows, figures, strict=True)])
    if found[0].results["suite"] == blimp.SUITE:
        curve = Curve(PHENOMENA, "accuracy", "share of pairs, good sentence preferred", line="phenomenon")
        drawn = tables[PHENOMENA] = as_columns(
            [
                row | {"phenomenon": term} | scores
                for row, each in zip(rows, found, strict=True)
                for term, scores in each.results["by_linguistics_term"].items()
            ]
        )
    else:
        curve = Curve(SCORES, "value", "scores on the text", line="of", panel="figure", panel_is_value=True)
        shown = [each.name for own in FIGURES.values() for each in own]
        drawn = as_columns(
            [
                row | {"of": "", "figure": name, "value": value}
                for row, own in zip(rows, figures, strict=True)
                for name, value in own.items()
                if name.rpartition("/")[2] in shown
            ]
        )
    for name, table in tables.items():
        write_csv(run.path / TABLES / f"{name}.csv", list(table), zip(*table.values(), strict=True))
    save(draw_curve(curve, drawn), run.path / "figures" / curve.table)


def joined_tables(rows: Sequence[Mapping[str, Any]], runs: Sequence[Path]) -> dict[str, Columns]:
    """The tables of several runs one below the other, by the file's name.

    Args:
        rows: what is put in front of the rows of each run, by column.
        runs: their directories.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for added, run in zip(rows, runs, strict=True):
        for path in sorted([*run.glob("*.csv"), *run.glob(f"{TABLES}/*.csv")]):
            with path.open(encoding="utf-8", newline="") as file:
                own = [{name: _number(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
            found.setdefault(path.stem, []).extend(_in_front(added, row) for row in own)
    return {name: as_columns(own) for name, own in found.items() if own}


def _in_front(added: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the training, then those of a row. If a row has its own `tokens`, such as the length of a text,
    those of the training are called `training_tokens`."""
    return {f"training_{name}" if name in row else name: value for name, value in added.items()} | dict(row)


def as_columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """The columns of a table, from its rows; None where a row has no such column."""
    return {column: [row.get(column) for row in rows] for column in dict.fromkeys(key for row in rows for key in row)}


def _number(cell: str) -> int | float | str | None:
    """The value of a cell of a table: a number only if it is written like one, unlike the words 007 or nan; None if the
    cell is empty."""
    for kind in (int, float):
        with suppress(ValueError):
            number: int | float = kind(cell)
            if str(number) == cell and number == number:
                return number
    return cell or None


def draw_curve(curve: Curve, table: Mapping[str, Sequence[Any]]) -> Figure:
    """The curves over the words or steps of training, or over the models if they are not of one run."""
    models = list(dict.fromkeys(table["model"]))
    x, place_of = _places(table, models)
    models.sort(key=lambda model: place_of[model])
    panels = list(dict.fromkeys(table[curve.panel])) if curve.panel else [""]
    labels = {name: f"layer {name}" if curve.line == "layer" else name for name in table[curve.line]}
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    of = f"{len(models)} models" if x == "model" else models[0].partition("@")[0]
    height = height_with_legend(labels.values())
    figure, grid = new_figure(f"{of}: {curve.title}", panels=len(panels), height=height)
    for axes, panel in zip(np.atleast_1d(grid), panels, strict=True):
        own = [row for row in rows if not curve.panel or row[curve.panel] == panel]
        value_of = {(row["model"], row[curve.line]): row[curve.value] for row in own}
        lines(
            axes,
            [place_of[model] for model in models],
            {label: [value_of.get((model, name)) for model in models] for name, label in labels.items()},
            joined=x != "model",
        )
        if x == "model":
            axes.set_xticks([place_of[model] for model in models], models, rotation=20)
        named = {"y": panel.replace("_", " ")} if curve.panel_is_value else {"y": curve.title, "title": panel}
        plain(axes, x=x, **named)
    return figure


def _places(table: Mapping[str, Sequence[Any]], models: Sequence[str]) -> tuple[str, dict[str, int]]:
    """What the horizontal axis shows, and where each model is on it."""
    if len({model.partition("@")[0] for model in models}) == 1:
        for column, label in (("words", "words read"), ("step", "training steps")):
            if column in table and None not in table[column]:
                return label, dict(zip(table["model"], table[column], strict=True))
    return "model", {model: number for number, model in enumerate(models)}
