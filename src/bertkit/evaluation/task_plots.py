"""Figures of a fine-tuned model: its learning curve, and which labels are confused.

In the style of evaluation/plots.py. Drawn from a run's metrics.jsonl and results.json, which fine-tuning writes; the
CSV file that a figure is drawn from is next to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.evaluation.plots import heat_map, lines, new_figure, plain
from bertkit.run.figure_files import save
from bertkit.run.metrics import METRICS_FILE, metrics_by_step
from bertkit.tables import write_csv
from bertkit.visible import number_of

MOST_LABELS = 30
"""With more labels, a map is not readable; results.json has the counts."""


def draw_task_figures(run: Path, results: Mapping[str, Any]) -> list[Path]:
    """Write `learning-curve` and `confusion-SPLIT` as .svg, .png and .csv below figures/ of a run.

    Args:
        run: the directory of a run with one seed.
        results: contents of its results.json.
    """
    directory = run / "figures"
    written = _learning_curve(run, directory)
    for split, found in results.get("confusion", {}).items():
        if len(found["labels"]) <= MOST_LABELS:
            written += _confusion(split, found["labels"], found["counts"], directory)
    return written


def _learning_curve(run: Path, directory: Path) -> list[Path]:
    rows = metrics_by_step(run / METRICS_FILE)
    scores = sorted({key for row in rows for key in row if _is_score(key)})
    if not scores:
        return []
    columns, table = ["step", "loss", *scores], directory / "learning-curve.csv"
    write_csv(table, columns, ([row.get(name) for name in columns] for row in rows))
    evaluated = [row for row in rows if any(key in row for key in scores)]
    groups = _by_scale({key: [row.get(key) for row in evaluated] for key in scores})
    figure, (losses, *panels) = new_figure(f"{run.name}: {number_of(rows[-1]['step'], 'step')}", panels=1 + len(groups))
    steps, values = _points(rows, "loss")
    losses.plot(steps, values, color="0.4", marker="o" if len(steps) == 1 else "")  # one point has no line
    plain(losses, x="step", y="training loss", title="")
    for axes, series in zip(panels, groups, strict=True):
        lines(axes, [row["step"] for row in evaluated], series)
        plain(axes, x="step", y="score" if len(series) > 1 else next(iter(series)), title="")
    for axes in (losses, *panels):
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return [table, *save(figure, directory / "learning-curve")]


def _by_scale(series: Mapping[str, list[float | None]]) -> list[dict[str, list[float | None]]]:
    """Scores of at most 1, and larger ones such as squared errors, next to which the former would all look like 0."""
    large = {key for key, values in series.items() if any(abs(value) > 1 for value in values if value is not None)}
    groups = [{key: values for key, values in series.items() if (key in large) is kind} for kind in (False, True)]
    return [group for group in groups if group]


def _is_score(key: str) -> bool:
    """Whether a column of the metrics is a score of a split, such as dev/accuracy or rte/dev/accuracy."""
    return "/" in key and key.partition("/")[0] not in ("loss", "accuracy", "lr")


def _points(rows: list[dict[str, Any]], column: str) -> tuple[list[int], list[float]]:
    pairs = [(row["step"], row[column]) for row in rows if row.get(column) is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _confusion(split: str, labels: list[str], counts: list[list[int]], directory: Path) -> list[Path]:
    stem = directory / f"confusion-{split.replace('/', '-')}"
    table = stem.with_suffix(".csv")
    write_csv(table, ["gold", *labels], ([gold, *row] for gold, row in zip(labels, counts, strict=True)))
    total = int(np.sum(counts))
    side = max(3.2, 0.5 * len(labels) + 1.6)
    figure, axes = new_figure(f"{split}: {number_of(total, 'example')}", width=side + 0.8, height=side)
    count_KK = np.array(counts, dtype=np.float64)
    heat_map(axes, count_KK, rows=labels, columns=labels, high=max(1.0, float(count_KK.max())), numbers="{:.0f}")
    axes.set(xlabel="predicted", ylabel="gold")
    axes.tick_params(axis="x", labelrotation=90 if max(map(len, labels)) > 4 else 0)
    return [table, *save(figure, stem)]
