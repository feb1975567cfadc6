"""Figures of a study: the scores of every arm with every seed, the scores of the candidates by setting, and scores by
FLOPs with the power law through the best of them.

In the style of evaluation/plots.py. The CSV file that a figure is drawn from is written next to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertkit.evaluation.plots import DASHES, MARKERS, SHADES, new_figure, plain
from bertkit.run.figure_files import save
from bertkit.study.settings import Study
from bertkit.tables import write_csv

SCORES, CHOICE, CURVES = "scores", "choice", "curves"
_PANEL, _LINE = 2.9, 0.36
"""Size in inches of a panel, and of an arm in it."""
_LOGARITHMIC = 4
"""Ratio of a key's largest to smallest value from which its axis is logarithmic."""


def draw_figures(directory: Path, study: Study, results: Mapping[str, Any]) -> list[Path]:
    """Write the figures and their tables; return the paths of the images."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = _draw_scores(directory / SCORES, study, results)
    if study.choose is not None:
        drawn += _draw_choice(directory / CHOICE, study, results)
    if "curves" in results:
        drawn += _draw_curves(directory / CURVES, study, results)
    return drawn


def factor(higher: bool) -> float:
    """The scale for display: accuracies and correlations are shown in percent, losses unchanged."""
    return 100.0 if higher else 1.0


def label(about: Mapping[str, Any]) -> str:
    """The title of a measure of `results["measures"]`, with its scale for display."""
    return str(about["title"]) + (" (x 100)" if factor(about["higher_is_better"]) > 1 else "")


def _draw_scores(stem: Path, study: Study, results: Mapping[str, Any]) -> list[Path]:
    """One panel per measure, one line per arm."""
    names = [name for name in study.measures if any(own[name] for own in results["scores"].values())]
    columns = ["arm", "seed", "steps", "tokens", "flops", *study.measures]
    rows = [{**run, **run["scores"]} for run in results["runs"]]
    write_csv(stem.with_suffix(".csv"), columns, [[row.get(column) for column in columns] for row in rows])
    if not names:
        return []
    arms = list(study.arms)[::-1]
    title = f"{study.title or study.name}: every seed, mean and standard deviation"
    height = _LINE * len(arms) + 1.3
    figure, axes = new_figure(title, panels=len(names), width=_PANEL * len(names) + 1.2, height=height)
    panels = [axes] if len(names) == 1 else list(axes)
    for number, (panel, name) in enumerate(zip(panels, names, strict=True)):
        about = results["measures"][name]
        scale = factor(about["higher_is_better"])
        for line, arm in enumerate(arms):
            summary = results["scores"][arm][name]
            if summary is None:
                continue
            seeds = [scale * score for score in summary["seeds"] if score is not None]
            panel.plot(seeds, [line] * len(seeds), "o", color="0.55", markersize=4)
            spread = scale * (summary["std"] or 0.0)
            panel.errorbar(scale * summary["mean"], line, xerr=spread, fmt="|", markersize=11, color="black", capsize=3)
        panel.set_yticks(range(len(arms)), [arm.replace("_", " ") for arm in arms] if number == 0 else [""] * len(arms))
        panel.set_ylim(-0.6, len(arms) - 0.4)
        panel.locator_params(axis="x", nbins=5)
        plain(panel, x=label(about), y="")
    return save(figure, stem)


def _draw_choice(stem: Path, study: Study, results: Mapping[str, Any]) -> list[Path]:
    """One panel per key of the common grid, one line per arm: the best candidate with each value."""
    assert study.choose is not None
    keys = list(study.choose.grid)
    rows = [
        [arm, *(candidate["setting"].get(key) for key in keys), candidate["setting"], candidate["score"]]
        for arm, own in results["choice"].items()
        for candidate in own["candidates"]
    ]
    write_csv(stem.with_suffix(".csv"), ["arm", *keys, "setting", "score"], rows)
    higher = study.measures[study.choose.names[0]].higher
    best, scale = (max, 100.0) if higher else (min, 1.0)
    title = f"{study.title or study.name}: candidates at {study.choose.budget_share:g} of the budget"
    figure, axes = new_figure(title, panels=len(keys), width=max(6.4, 4.6 * len(keys)), height=4.6)
    panels = [axes] if len(keys) == 1 else list(axes)
    for panel, key in zip(panels, keys, strict=True):
        values = study.choose.grid[key]
        numeric = all(isinstance(value, int | float) for value in values)
        for number, (arm, own) in enumerate(results["choice"].items()):
            found = [
                best(scores) if (scores := _with(own["candidates"], key, value)) else float("nan") for value in values
            ]
            places = sorted(range(len(values)), key=lambda place: values[place]) if numeric else range(len(values))
            panel.plot(
                [values[place] if numeric else place for place in places],
                [scale * found[place] for place in places],
                label=arm.replace("_", " "),
                color=SHADES[number % len(SHADES)],
                linestyle=DASHES[number % len(DASHES)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=4,
            )
        if numeric and min(values) > 0 and max(values) / min(values) >= _LOGARITHMIC:
            panel.set_xscale("log")
            panel.minorticks_off()
        panel.set_xticks(values if numeric else range(len(values)), [f"{value}" for value in values])
        by = " and ".join(study.measures[name].title or name for name in study.choose.names)
        mean = "mean of " if len(study.choose.names) > 1 else ""
        plain(panel, x=key, y=f"{mean}{by}" + (" (x 100)" if higher else ""))
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, fontsize="small", loc="outside right center")
    return save(figure, stem)


def _draw_curves(stem: Path, study: Study, results: Mapping[str, Any]) -> list[Path]:
    """One panel per measure, one line per curve in the shade of its frontier, and each frontier's power law."""
    from matplotlib.ticker import LogLocator, NullFormatter

    found: Mapping[str, Any] = results["curves"]
    columns = ["measure", "frontier", "curve", "arm", "flops", "score"]
    points = [
        [name, frontier, *(point[column] for column in columns[2:])]
        for name, frontiers in found.items()
        for frontier, own in frontiers.items()
        for point in own["points"]
    ]
    write_csv(stem.with_suffix(".csv"), columns, points)
    curves_of: dict[str, dict[str, None]] = {}  # in all panels the same, whatever each measure is defined for
    for _, frontier, curve, *_ in points:
        curves_of.setdefault(frontier, {})[curve] = None
    title = f"{study.title or study.name}: scores by training FLOPs"
    figure, axes = new_figure(title, panels=len(found), width=4.9 * len(found) + 1.6, height=4.4)
    panels = [axes] if len(found) == 1 else list(axes)
    for panel, (name, frontiers) in zip(panels, found.items(), strict=True):
        about = results["measures"][name]
        scale = factor(about["higher_is_better"])
        for number, (frontier, curves) in enumerate(curves_of.items()):
            own = frontiers.get(frontier, {"points": [], "law": None})
            shade, dash = SHADES[number % len(SHADES)], DASHES[1 + number % (len(DASHES) - 1)]
            for place, curve in enumerate(curves):
                ours = [point for point in own["points"] if point["curve"] == curve]
                if not ours:
                    continue
                panel.plot(
                    [point["flops"] for point in ours],
                    [scale * point["score"] for point in ours],
                    label=curve,
                    color=shade,
                    linewidth=0.8,
                    marker=MARKERS[place % len(MARKERS)],
                    markersize=5,
                    markerfacecolor=shade if number % 2 == 0 else "white",
                )
            if own["law"] is not None:
                ends = [own["points"][place]["flops"] for place in (0, -1)]
                law = [(own["law"]["scale"] / flops) ** own["law"]["exponent"] for flops in ends]
                panel.plot(ends, law, label=f"{frontier}, power law", color=shade, linestyle=dash, linewidth=1.8)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter(lambda flops, _: f"{flops:.0e}".replace("e+", "e"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        if not about["higher_is_better"]:
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("{x:g}")
        plain(panel, x="training FLOPs", y=label(about))
    drawn = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(list(drawn.values()), list(drawn), frameon=False, fontsize="small", loc="outside right center")
    return save(figure, stem)


def _with(candidates: Sequence[Mapping[str, Any]], key: str, value: Any) -> list[float]:
    """Scores of the candidates that have this value."""
    return [each["score"] for each in candidates if each["setting"].get(key) == value and each["score"] is not None]
