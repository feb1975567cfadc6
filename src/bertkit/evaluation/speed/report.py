"""The report of `eval speed`: two tables as CSV, and a figure of scores (or sizes) against milliseconds.

In the style of evaluation/plots.py: grey, distinguished by marker, each point labelled with its model.

Files: tables/speed.csv, tables/compression.csv, figures/pareto.svg, .png and the .csv they are drawn from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertkit.evaluation.plots import MARKERS, new_figure, plain
from bertkit.run.figure_files import save
from bertkit.tables import write_csv
from bertkit.visible import number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SPEED = (
    *("batch", "length", "model", "ms_per_sentence", "ms_lower_quartile", "ms_upper_quartile"),
    *("sentences_per_second", "speed_up", "reason"),
)
_PANEL_WIDTH, _PANEL_HEIGHT = 6.4, 4.4
_LINE = 12.0
"""Vertical distance between names, in points."""
_NARROW = 5.0
"""An axis up to this ratio of its ends has evenly spaced ticks."""


def write_report(directory: Path, results: Mapping[str, Any]) -> None:
    """Write tables and figures below a run's directory.

    Args:
        directory: the run's directory.
        results: contents of its results.json.
    """
    write_table(directory / "tables" / "speed.csv", _SPEED, results["cells"])
    rows = [compression_row(row) for row in results["compression"]]
    write_table(directory / "tables" / "compression.csv", tuple(rows[0]), rows)
    points = results["pareto"]["points"]
    if points:
        write_table(directory / "figures" / "pareto.csv", tuple(points[0]), points)
        save(draw_pareto(results), directory / "figures" / "pareto")


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file; missing values are empty cells."""
    write_csv(path, columns, ([row.get(name) for name in columns] for row in rows))


def compression_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the compression table with the published row next to it, flattened for CSV."""
    published = row["published"] or {}
    names = ("title", "compression", "retention", "speed_up", "against", "source", "note")
    return {
        "model": row["label"],
        **{name: row[name] for name in ("size", "parameters", "retention", "speed_up", "measured_at")},
        "tasks": " ".join(row["tasks"]),
        **{f"published_{name}": published.get(name) for name in names},
        "known_by": row["known_by"],
    }


def draw_pareto(results: Mapping[str, Any]) -> Figure:
    """One panel per batch size: milliseconds (logarithmic) against score or size; the frontier is a line."""
    pareto = results["pareto"]
    against = pareto["against"]
    points: Sequence[Mapping[str, Any]] = pareto["points"]
    batches = list(dict.fromkeys(point["batch"] for point in points))
    rounds, threads = results["settings"]["rounds"], results["threads"]
    where = number_of(threads, "thread") if results["device"] == "cpu" else results["device"]
    where += ", processor time" if results["settings"]["clock"] == "processor" else ""
    goal = "score" if against == "score" else "size"
    title = (
        f"Speed and {goal}: {points[0]['length']} tokens per sentence, {where}, median and quartiles of"
        f" {number_of(rounds, 'round')}"
    )
    figure, axes = new_figure(title, panels=len(batches), width=_PANEL_WIDTH * len(batches), height=_PANEL_HEIGHT)
    tasks = pareto["tasks"]
    which = f"mean of {len(tasks)} tasks" if len(tasks) > 1 else "".join(tasks)
    heights = {
        "score": f"score, % ({which})",
        "parameters": "parameters, millions (log scale)",
        "disk_mb": "weight files, MB (log scale)",
    }
    labels = list(dict.fromkeys(point["model"] for point in points))
    for panel, batch in zip([axes] if len(batches) == 1 else axes, batches, strict=True):
        own = [point for point in points if point["batch"] == batch]
        _draw_panel(panel, own, labels, against)
        plain(panel, x="milliseconds per sentence (log scale)", y=heights[against], title=f"batch of {batch}")
        panel.grid(visible=False, which="minor")
    return figure


def _draw_panel(axes: Axes, points: Sequence[Mapping[str, Any]], labels: Sequence[str], against: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    xs = [point["ms_per_sentence"] for point in points]
    by_score, scale = against == "score", {"score": 100, "parameters": 1e-6, "disk_mb": 1}[against]
    ys = [scale * point[against] for point in points]
    axes.set_xscale("log")
    axes.set_xlim(
        min(point["ms_lower_quartile"] for point in points) / 1.4,
        max(point["ms_upper_quartile"] for point in points) * 1.4,
    )
    if by_score:
        margin = max(1.0, 0.15 * (max(ys) - min(ys)))
        axes.set_ylim(min(ys) - margin, max(ys) + margin)
    else:
        axes.set_yscale("log")
        axes.set_ylim(min(ys) / 1.6, max(ys) * 1.6)
    for axis in (axes.xaxis, axes.yaxis) if not by_score else (axes.xaxis,):
        low, high = axis.get_view_interval()
        # Of 1, 2 and 5, a narrow range may contain a single one, or none.
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high > _NARROW * low else MaxNLocator(4))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    for point, x, y in zip(points, xs, ys, strict=True):
        spread = [[x - point["ms_lower_quartile"]], [point["ms_upper_quartile"] - x]]
        marker = MARKERS[labels.index(point["model"]) % len(MARKERS)]
        filled = "black" if point["on_frontier"] else "white"
        axes.errorbar(
            x, y, xerr=spread, marker=marker, markersize=7, markerfacecolor=filled, color="black", elinewidth=1
        )
    best = sorted((x, y) for point, x, y in zip(points, xs, ys, strict=True) if point["on_frontier"])
    axes.plot(*zip(*best, strict=True), color="0.6", linestyle="--", zorder=0)
    axes.plot([], [], color="0.6", linestyle="--", marker="o", markerfacecolor="black", label="frontier")
    axes.plot(
        [], [], color="white", marker="o", markeredgecolor="black", label="another model is as good or better in both"
    )
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(0.0, -0.16), ncols=2)
    _name_points(axes, [point["model"] for point in points], xs, ys)


def _name_points(axes: Axes, names: Sequence[str], xs: Sequence[float], ys: Sequence[float]) -> None:
    """Write the names in a column on the right, ordered by height, each with a line to its point; next to the points,
    names of nearby models would overlap."""
    height = axes.bbox.height * 72 / axes.figure.dpi
    order = sorted(range(len(names)), key=lambda index: ys[index])
    across = [float(axes.transAxes.inverted().transform(axes.transData.transform((xs[i], ys[i])))[1]) for i in order]
    places = dict(zip(order, spread(across, least=_LINE / height, top=1.0), strict=True))
    for index, place in without_crossings(places, xs, dict(zip(order, across, strict=True))).items():
        axes.annotate(
            names[index],
            (xs[index], ys[index]),
            xytext=(1.04, place),
            textcoords="axes fraction",
            va="center",
            fontsize="small",
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.7, "shrinkA": 2, "shrinkB": 5},
            annotation_clip=False,
        )


def without_crossings(
    places: Mapping[int, float], xs: Sequence[float], heights: Mapping[int, float]
) -> dict[int, float]:
    """The places of names by point, exchanged among points of equal height so that no two of their lines cross: the
    further left a point is, the further its name is from the common height.

    Args:
        places: of each point's name.
        xs: of each point.
        heights: of each point.
    """
    found: dict[int, float] = {}
    for height in dict.fromkeys(heights.values()):
        tied = sorted((index for index in places if heights[index] == height), key=lambda index: xs[index])
        own = sorted((places[index] for index in tied), key=lambda place: -abs(place - height))
        found |= dict(zip(tied, own, strict=True))
    return found


def spread(places: Sequence[float], *, least: float, top: float) -> list[float]:
    """Ascending positions, moved as little as possible to be at least `least` apart and not above the top."""
    moved: list[float] = []
    for place in places:
        moved.append(place if not moved else max(place, moved[-1] + least))
    limit = top
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - least
    return moved
