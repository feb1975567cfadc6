"""Scores by training FLOPs: points of each curve, the best over all sizes at each cost, a power law through them.

Kaplan et al. 2020, Scaling laws for neural language models, arXiv:2001.08361, section 3 and figure 1: losses of many
sizes by the FLOPs of their training, and L(C) = (C_0 / C)^b through the lowest of them, the compute-efficient frontier.
Here each point is a run with its own schedule, as Hoffmann et al. 2022, arXiv:2203.15556, section 3 found necessary:
the loss in the middle of a longer schedule is higher than that of a run that ends there. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from bertkit.study.settings import Study

FEWEST = 3
"""Minimum number of points to fit a power law: any two points are on one."""


@dataclass(frozen=True)
class Point:
    """An arm, as means over its seeds.

    Attributes:
        arm, curve: their names.
        flops: training FLOPs of a run.
        score: score of one measure.
    """

    arm: str
    curve: str
    flops: float
    score: float


def curves(study: Study, results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The frontiers of the study for each measure: `{measure: {frontier: {"points", "best", "law", "ratio"}}}`.

    `points` are all arms of the frontier's curves. `best` are the names of the arms whose score no other arm reaches
    with as few FLOPs. `law` is the fit of score = (scale / FLOPs)^exponent to `best`; None if `best` has fewer than
    three arms or the measure is not a loss. `ratio` is how many times as many FLOPs the baseline's frontier needs for
    the best score that both reach; None if they have none in common.

    Args:
        study: resolved.
        results: scores and runs from `study_results`.
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
    """The points that are better than all points of equal or lower cost, by increasing FLOPs."""
    sign = 1.0 if higher else -1.0
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.flops, -sign * point.score)):
        if not best or sign * point.score > sign * best[-1].score:
            best.append(point)
    return best


def power_law(points: Sequence[Point]) -> dict[str, float] | None:
    """`{"scale": C_0, "exponent": b}` of score = (C_0 / FLOPs)^b, by least squares on the logarithms."""
    if len(points) < FEWEST or any(point.score <= 0 for point in points):
        return None
    slope, height = np.polyfit(np.log([point.flops for point in points]), np.log([point.score for point in points]), 1)
    return {"scale": float(np.exp(-height / slope)), "exponent": float(-slope)} if slope < 0 else None


def ratio(against: Sequence[Point], best: Sequence[Point], *, higher: bool) -> float | None:
    """FLOPs of one frontier divided by those of another at the best score that both reach; never extrapolated."""
    if not against or not best:
        return None
    last = (min if higher else max)(against[-1].score, best[-1].score)
    costs = [_flops_at(last, points) for points in (against, best)]
    return None if None in costs else costs[0] / costs[1]  # type: ignore[operator]  # neither is None


def _flops_at(score: float, points: Sequence[Point]) -> float | None:
    """FLOPs at a score, by linear interpolation of their logarithm; None if the score is outside the points' range."""
    scores = np.array([point.score for point in points])
    if not scores.min() <= score <= scores.max():
        return None
    order = np.argsort(scores)
    logs = np.log([point.flops for point in points])
    return float(np.exp(np.interp(score, scores[order], logs[order])))


def mean_of(runs: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The mean cost of runs, such as `tokens` or `flops`, over the runs that have it; None if none has it."""
    known = [run[key] for run in runs if run[key]]
    return fmean(known) if known else None
