"""Figures of evaluations and probes in one style, readable in greyscale.

Sibling run/plots.py draws training curves; run/figure_files.py writes the files of both. Lines differ by marker and
dash, never by colour alone; heat maps are grey and show their numbers if there is room. Callers give units and n in
labels and titles. matplotlib is only imported when a figure is made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.arrays import Float64Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SHADES = ("black", "0.35", "0.55")
PANEL_WIDTH, PANEL_HEIGHT = 4.6, 3.8
"""Inches."""
_LEGEND_ROW = 0.19
"""Inches."""
_LONGEST_OF_TWO = 24
"""Characters of a label, of which two fit below a panel."""
_MOST_NUMBERS = 20
"""A heat map with more rows or columns than this does not show its numbers."""
_DARK = 0.6


def new_figure(
    title: str, *, panels: int = 1, rows: int = 1, width: float = 0, height: float = 0
) -> tuple[Figure, Any]:
    """A figure and its axes.

    Args:
        title: title of the whole figure: what was measured, for which model, on how many items.
        panels: columns of axes.
        rows: rows of axes.
        width, height: in inches; if 0, determined by the number of panels.

    Returns:
        The figure and its axes: a single one, or an array if there are several.
    """
    from matplotlib.figure import Figure

    size = (width or PANEL_WIDTH * panels, height or PANEL_HEIGHT * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, panels)
    figure.suptitle(title, fontsize="medium")
    return figure, axes


def plain(axes: Axes, *, x: str, y: str, title: str = "") -> None:
    """Set labels, a light grid and no frame."""
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize="medium")
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def lines(
    axes: Axes, x: Sequence[float] | Float64Array, series: Mapping[str, Sequence[float | None]], *, joined: bool = True
) -> None:
    """Draw one line per series, distinguished by marker and dash, with a legend below; missing values are gaps. Without
    `joined`, only the markers: for places without an order, such as models."""
    for number, (label, values) in enumerate(series.items()):
        axes.plot(
            x,
            np.array(values, dtype=float),
            label=label,
            color=SHADES[number % len(SHADES)],
            linestyle=DASHES[number % len(DASHES)] if joined else "none",
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
        )
    if len(series) > 1:
        # Below the axes: inside, lines might cross it.
        axes.legend(
            frameon=False,
            fontsize="small",
            loc="upper left",
            bbox_to_anchor=(0.0, -0.16),
            ncols=_legend_columns(series),
            handlelength=3,
        )


def _legend_columns(labels: Collection[str]) -> int:
    return 1 if len(labels) <= 3 or max(map(len, labels)) > _LONGEST_OF_TWO else 2


def height_with_legend(labels: Collection[str]) -> float:
    """The height in inches of a row of panels with many lines: that of `new_figure`, and their legend below."""
    return PANEL_HEIGHT + _LEGEND_ROW * max(0, math.ceil(len(labels) / _legend_columns(labels)) - 3)


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend below all panels, with the labels of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize="small", loc="outside lower center", ncols=len(labels))


def layer_ticks(axes: Axes, layers: int, *, first: int = 0) -> None:
    """Integer layer ticks on the horizontal axis; the embeddings are 0."""
    step = 1 if layers <= 13 else 2 if layers <= 25 else 4
    axes.set_xticks(range(first, first + layers, step))


def heat_map(
    axes: Axes,
    values: Float64Array,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    low: float = 0.0,
    high: float = 1.0,
    numbers: str = "{:.2f}",
) -> Any:
    """Draw a grey heat map, darker is higher, rows from the top. Returns the image, for a colour bar.

    Args:
        values: (rows, columns); masked cells are left out.
        rows, columns: their names.
        low, high: limits of the scale.
        numbers: format of a cell's value if the map is small; no values if empty.
    """
    image = axes.imshow(values, cmap="Greys", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    if numbers and max(len(rows), len(columns)) <= _MOST_NUMBERS:
        for (row, column), value in np.ma.ndenumerate(values):  # type: ignore[no-untyped-call]  # numpy has no types
            share = (value - low) / ((high - low) or 1)
            colour = "white" if share > _DARK else "black"
            text = numbers.format(value).replace("0.", ".", 1) if abs(value) < 1 else numbers.format(value)
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize="x-small")
    return image
