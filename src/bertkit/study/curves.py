"""Scores by training FLOPs: the points of each curve, the best of all sizes at each cost, and a power law through them.

Kaplan et al. 2020, Scaling laws for neural language models, arXiv:2001.08361, section 3 and figure 1: losses of many
sizes by the FLOPs of their training, and L(C) = (C_0 / C)^b through the lowest of them, the compute-efficient frontier.
Here a run is a point with its own schedule, as Hoffmann et al. 2022, arXiv:2203.15556, section 3 found necessary: a
loss in the midst of a longer schedule is higher than that of a run which ends there. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from bertkit.study.settings import Study

FEWEST = 3
"""Points that a power law is fitted through, at least: two are always on one."""


@dataclass(frozen=True)
class Point:
    """An arm: means over its seeds.

    Attributes:
        arm, curve: their names.
        flops: training FLOPs of a run.
        score: of a measure.
    """

    arm: str
    curve: str
    flops: float
    score: float


def curves(study: Study, results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each measure, the frontiers of the study: `{measure: {frontier: {"points", "best", "law", "ratio"}}}`.

    `points` are all arms of its curves. `best` are the names of those that no other reaches with as few FLOPs. `law`
    is the fit of score = (scale / FLOPs)^exponent to `best`, None where fewer than three arms are in it or the measure
    is no loss. `ratio` is how many times as many FLOPs the baseline's frontier needs for the best score that both
    reach; None where they have none in common.

    Args:
        study: resolved.
        results: the scores and runs of `study_results`.
    """
    flops = {arm: mean_of([run for run in results["runs"] if run["arm"] == arm], "flops") for arm in study.arms}
    found: dict[str, dict[str, Any]] = {}
    for name, measure in study.measures.items():
        frontiers: dict[str, list[Point]] = {}
        for arm, own in study.arms.items():
            summary, cost = results["scores"][arm][name], flops[arm]
            if own.curve is not None and summary is not None and summary["mean"] is not None and cost is not None:
                point = Point(arm, own.curve, cost, summary["mean"])
                frontiers.setdefault(own.frontier or own.curve, []).append(point)
        if not frontiers:
            continue
        baseline = study.arms[study.against]
        against = best_of(frontiers.get(baseline.frontier or baseline.curve or "", []), higher=measure.higher)
        found[name] = {}
        for frontier, points in frontiers.items():
            best = best_of(points, higher=measure.higher)
            found[name][frontier] = {
                "points": [asdict(point) for point in sorted(points, key=lambda point: point.flops)],
                "best": [point.arm for point in best],
                "law": None if measure.higher else power_law(best),
                "ratio": ratio(against, best, higher=measure.higher),
            }
    return found


def best_of(points: Sequence[Point], *, higher: bool) -> list[Point]:
    """The points better than all that cost as little or less, by rising FLOPs."""
    sign = 1.0 if higher else -1.0
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.flops, -sign * point.score)):
        if not best or sign * point.score > sign * best[-1].score:
            best.append(point)
    return best


def power_law(points: Sequence[Point]) -> dict[str, float] | None:
    """`{"scale": C_0, "exponent": b}` of score = (C_0 / FLOPs)^b, by least squares of the logarithms."""
    if len(points) < FEWEST or any(point.score <= 0 for point in points):
        return None
    slope, height = np.polyfit(np.log([point.flops for point in points]), np.log([point.score for point in points]), 1)
    return {"scale": float(np.exp(-height / slope)), "exponent": float(-slope)} if slope < 0 else None


def ratio(against: Sequence[Point], best: Sequence[Point], *, higher: bool) -> float | None:
    """FLOPs of one frontier over those of another, at the best score that both reach; nothing is extrapolated."""
    if not against or not best:
        return None
    last = (min if higher else max)(against[-1].score, best[-1].score)
    costs = [_flops_at(last, points) for points in (against, best)]
    return None if None in costs else costs[0] / costs[1]  # type: ignore[operator]  # neither is None


def _flops_at(score: float, points: Sequence[Point]) -> float | None:
    """By linear interpolation of the logarithm of the FLOPs; None for a score that is not between those of two."""
    scores = np.array([point.score for point in points])
    if not scores.min() <= score <= scores.max():
        return None
    order = np.argsort(scores)
    logs = np.log([point.flops for point in points])
    return float(np.exp(np.interp(score, scores[order], logs[order])))


def mean_of(runs: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The mean of what runs cost, such as `tokens` or `flops`, over those that have it; None where none has."""
    known = [run[key] for run in runs if run[key]]
    return fmean(known) if known else None
