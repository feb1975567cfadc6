"""Figures of a run: loss and held-out accuracy against tokens read, as SVG and PNG, and the plotted values as CSV.

Not from a paper (contract: the run directory). Readable in greyscale: lines differ by dash and marker, not only by
colour.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.run.figure_files import save
from bertkit.run.metrics import metrics_by_step
from bertkit.tables import write_csv

_TRAINING, _HELD_OUT = "loss", "held_out/loss"
_ACCURACY = "held_out/accuracy/"
_DASHES, _MARKERS = ("-", "--", "-."), ("o", "s", "^", "D")


def draw_curves(metrics: Path, directory: Path, *, title: str, baseline: float | None = None) -> list[Path]:
    """Draw `curves.svg`, `curves.png` and write `curves.csv`.

    Args:
        metrics: the run's metrics.jsonl.
        directory: where the files are written; made if missing.
        title: of the figure.
        baseline: accuracy of the unigram baseline, drawn as a dotted line.
    """
    rows = _with_tokens(metrics_by_step(metrics))
    directory.mkdir(parents=True, exist_ok=True)
    accuracies = sorted({key for row in rows for key in row if key.startswith(_ACCURACY)})
    columns = ["step", "tokens", "lr", _TRAINING, _HELD_OUT, *accuracies]
    table = directory / "curves.csv"
    write_csv(table, columns, ([row.get(name) for name in columns] for row in rows))
    return [table, *_draw(rows, accuracies, directory / "curves", title=title, baseline=baseline)]


def _with_tokens(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows; those of evaluations between two log lines get the tokens read until then, interpolated by step."""
    counted = [(row["step"], row["tokens"]) for row in rows if "tokens" in row]
    if not counted:
        return rows
    steps, tokens = (np.array(each, dtype=np.float64) for each in zip((0, 0), *counted, strict=True))
    return [row if "tokens" in row else row | {"tokens": round(np.interp(row["step"], steps, tokens))} for row in rows]


def _points(rows: list[dict[str, Any]], column: str) -> tuple[list[float], list[float]]:
    """Millions of tokens and the values, from the rows that have both."""
    pairs = [(row["tokens"] / 1e6, row[column]) for row in rows if row.get(column) is not None and "tokens" in row]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _draw(
    rows: list[dict[str, Any]], accuracies: list[str], stem: Path, *, title: str, baseline: float | None
) -> list[Path]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    losses, shares = figure.subplots(1, 2)
    tokens, trained = _points(rows, _TRAINING)
    alone = "s" if len(tokens) == 1 else ""  # a line of one point would not be visible
    losses.plot(tokens, trained, color="0.6", marker=alone, markersize=3, label="training")
    losses.plot(*_points(rows, _HELD_OUT), color="black", marker="o", markersize=3, label="held out")
    losses.set(xlabel="tokens read (millions)", ylabel="loss (nats, weighted sum of terms)")
    for name, dashes, marker in zip(accuracies, cycle(_DASHES), cycle(_MARKERS), strict=False):
        label = name.removeprefix(_ACCURACY)
        shares.plot(*_points(rows, name), color="black", linestyle=dashes, marker=marker, markersize=3, label=label)
    if baseline is not None:
        shares.axhline(baseline, color="0.5", linestyle=":", label="masked words, unigram baseline")
    shares.set(xlabel="tokens read (millions)", ylabel="held-out accuracy", ylim=(0, None))
    for axes in (losses, shares):
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    figure.suptitle(title)
    return save(figure, stem)
