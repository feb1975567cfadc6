"""A probe of one model, applied to several: what a model has learned by which checkpoint, or how models differ.

Each model is probed in a run of its own, which is reused like any other. Another run has their tables one below the
other, with the columns `model`, `step` and `tokens` (of training) in front, and the main figures by step.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.errors import UsageError
from bertkit.evaluation.loaded_model import LoadedModel, each_name, load_models
from bertkit.evaluation.plots import height_with_legend, lines, new_figure, plain
from bertkit.probing import ProbeSettings
from bertkit.probing.report import Finding, Report, Table
from bertkit.probing.run import ProbeArguments, ProbeResult, run_probe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Probe = Callable[[ProbeArguments, Any], ProbeResult]


@dataclass(frozen=True)
class Curve:
    """A figure by model, from the column `value` of a table: a line for each value of the column `line`, in a panel for
    each value of the column `panel`, if there is one."""

    table: str
    value: str
    title: str
    line: str = "layer"
    panel: str | None = None


CURVES = {
    "layers": Curve("layers", "score", "score of the linear probe", panel="task"),
    "structure": Curve("structure", "uuas", "UUAS"),
    "behaviour": Curve("minimal_pairs", "accuracy", "share of pairs, good sentence preferred", line="phenomenon"),
    "contextuality": Curve("contextuality", "self_similarity_adjusted", "self-similarity minus anisotropy"),
}
"""The main figure of a kind of probe, for those that have one."""


def probe_each(request: ProbeArguments, settings: ProbeSettings, probe: Probe) -> ProbeResult:
    """Probe every model and write the run with the results of all; a single model has only its own.

    Args:
        request: with any number of models; `run_dir` is that of the results of all.
        settings: the settings of the kind.
        probe: probes one model and writes a run.

    Raises:
        UsageError: a model is given twice, or as of the probe.
        DataError: as of the probe.
    """
    names = each_name(request.models)
    if settings.compares_models or len(names) == 1:
        return probe(request, settings)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--model {twice} is given twice; name different models or checkpoints")
    results = [probe(replace(request, models=[name], run_dir=None), settings) for name in names]
    data = {str(each.run.path): each.run.record["what_hash"] for each in results if each.run is not None}
    subjects = [_without_weights(name, request) for name in names]
    if len({each.label for each in subjects}) < len(subjects):
        subjects = [replace(each, label=each.name) for each in subjects]
    return run_probe(request, settings, subjects, partial(_combined, settings.kind, subjects, results), data=data)


def _without_weights(name: str, request: ProbeArguments) -> LoadedModel:
    """A model for the record, which needs its names and hashes only."""
    (subject,) = load_models([name], offline=request.offline)
    subject.model.to("meta")
    return subject


def _combined(kind: str, subjects: Sequence[LoadedModel], results: Sequence[ProbeResult]) -> Report:
    """The results of all models as one report."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for subject, each in zip(subjects, results, strict=True):
        assert each.run is not None
        trained = subject.training or {}
        added = {"model": subject.label, "step": trained.get("steps"), "tokens": trained.get("tokens")}
        for path in sorted((each.run.path / "tables").glob("*.csv")):
            with path.open(encoding="utf-8", newline="") as file:
                own = [{name: _number(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
            # `probe effective-attention` has a column `tokens`, the length of its texts.
            rows.setdefault(path.stem, []).extend(
                {**{f"training_{name}" if name in row else name: value for name, value in added.items()}, **row}
                for row in own
            )
    tables = {
        name: {column: [row.get(column) for row in own] for column in dict.fromkeys(key for row in own for key in row)}
        for name, own in rows.items()
        if own
    }
    curve = CURVES.get(kind)
    findings = [
        Finding(
            name,
            f"The table {name} has the rows of {len(subjects)} models.",
            table,
            partial(draw_curve, curve) if curve is not None and name == curve.table else None,
        )
        for name, table in tables.items()
    ]
    findings += [Finding(each.label, own.sentences[0]) for each, own in zip(subjects, results, strict=True)]
    summary = {
        "models": {each.name: own.results["summary"] for each, own in zip(subjects, results, strict=True)},
        "runs": {each.name: str(own.run and own.run.path) for each, own in zip(subjects, results, strict=True)},
    }
    return Report(summary, results[0].results["definitions"], findings)


def _number(cell: str) -> int | float | str | None:
    """The value of a cell of a table: a number only if it is written like one, unlike the words 007 or nan; None if the
    cell is empty."""
    for kind in (int, float):
        with suppress(ValueError):
            number: int | float = kind(cell)
            if str(number) == cell and number == number:
                return number
    return cell or None


def draw_curve(curve: Curve, table: Table) -> Figure:
    """The curves over the models' steps, or over the models if they are not of one run."""
    models = list(dict.fromkeys(table["model"]))
    step_of = dict(zip(table["model"], table["step"], strict=True))
    by_step = len({model.partition("@")[0] for model in models}) == 1 and None not in step_of.values()
    places = {model: step_of[model] if by_step else number for number, model in enumerate(models)}
    panels = list(dict.fromkeys(table[curve.panel])) if curve.panel else [""]
    labels = {name: f"layer {name}" if curve.line == "layer" else name for name in table[curve.line]}
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    of = models[0].partition("@")[0] if by_step else f"{len(models)} models"
    height = height_with_legend(labels.values())
    figure, grid = new_figure(f"{of}: {curve.title}", panels=len(panels), height=height)
    for axes, panel in zip(np.atleast_1d(grid), panels, strict=True):
        own = [row for row in rows if not curve.panel or row[curve.panel] == panel]
        value_of = {(row["model"], row[curve.line]): row[curve.value] for row in own}
        lines(
            axes,
            list(places.values()),
            {label: [value_of.get((model, name)) for model in models] for name, label in labels.items()},
        )
        if not by_step:
            axes.set_xticks(list(places.values()), models, rotation=20)
        plain(axes, x="training steps" if by_step else "model", y=curve.title, title=panel)
    return figure
