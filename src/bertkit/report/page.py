"""An HTML page for one or several runs: facts, scores, differences between their recipes, curves and figures.

Contract: `bertkit report`: one self-contained page. No script, no network, no time of day: the same runs give the same
bytes. Figures are embedded as images, so that scripts in an SVG cannot run.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from bertkit import __version__
from bertkit.evaluation.plots import DASHES, MARKERS, SHADES, new_figure, plain
from bertkit.report.gather import ReportedRun, different_settings
from bertkit.run.figure_files import svg_of

_TEMPLATE = "page.html"
_MANY = 24
"""Number of rows above which a table is collapsed."""
_MOST_COLUMNS = 6
"""Number of runs above which a table has a row for each run."""
_MOST_NAMES = 4
"""Number of runs above which the title does not name each."""
_MOST_POINTS = 600
"""Maximum number of points of a line; longer runs are subsampled."""
_FEW_POINTS = 40
"""Maximum number of points for which each has a marker; a single point has nothing else."""
_HELD_OUT = {"held_out/loss": "held-out loss", "dev/loss": "dev loss"}
"""Losses on text or examples not trained on; the first that a run has is used."""


def page(runs: Sequence[ReportedRun], title: str = "") -> str:
    """The page.

    Args:
        runs: at least one.
        title: title of the page; if empty, the runs' names, of many only the first one's.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("bertkit.report").joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    names = dict.fromkeys(name for run in runs for name in run.scores)
    main = {name for run in runs for name in run.main_scores}
    scores = {name: [run.scores[name].in_words if name in run.scores else "" for run in runs] for name in names}
    facts = dict.fromkeys(name for run in runs for name in run.facts)
    several = f"{runs[0].name} and {len(runs) - 1} more runs"
    return template.render(
        title=title or (several if len(runs) > _MOST_NAMES else ", ".join(run.name for run in runs)),
        version=__version__,
        runs=runs,
        facts={name: [run.facts.get(name, "") for run in runs] for name in facts},
        scores={name: found for name, found in scores.items() if name in main},
        further={name: found for name, found in scores.items() if name not in main},
        many=_MANY,
        most_columns=_MOST_COLUMNS,
        differences=different_settings(runs) if len(runs) > 1 else {},
        curves=_curves(runs) if len(runs) > 1 else "",
        figures=[[(path.stem, _data(path.read_bytes())) for path in run.figures] for run in runs],
    )


def _data(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode('ascii')}"


def _curves(runs: Sequence[ReportedRun]) -> str:
    """Training and held-out loss by step, one line per run; empty if fewer than two runs have any."""
    held_out = next((name for name in _HELD_OUT for run in runs if any(name in row for row in run.curve)), None)
    panels = [("loss", "training loss"), *([] if held_out is None else [(held_out, _HELD_OUT[held_out])])]
    found = {name: {run.path: _points(run, name) for run in runs} for name, _ in panels}
    if sum(bool(steps) for steps, _ in found["loss"].values()) < 2:
        return ""
    figure, axes = new_figure("", panels=len(panels), height=3.6 + 0.25 * len(runs))
    places = [axes] if len(panels) == 1 else list(axes)
    for place, (name, label) in zip(places, panels, strict=True):
        for number, run in enumerate(runs):
            steps, values = found[name][run.path]
            style = {"color": SHADES[number % len(SHADES)], "linestyle": DASHES[number % len(DASHES)]}
            marker = MARKERS[number % len(MARKERS)] if len(steps) <= _FEW_POINTS else ""
            place.plot(steps, values, label=run.name, linewidth=1.2, marker=marker, markersize=4, **style)
        plain(place, x="step", y=label)
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize="small", loc="outside lower left", ncols=1, handlelength=4)
    return _data(svg_of(figure))


def _points(run: ReportedRun, name: str) -> tuple[list[int], list[float]]:
    """Steps and values that a run has; subsampled if there are many."""
    rows = [row for row in run.curve if row.get(name) is not None]
    rows = rows[:: max(1, -(-len(rows) // _MOST_POINTS))]
    return [row["step"] for row in rows], [row[name] for row in rows]
