"""Warnings about runs that do no better than a constant prediction: one run, a suite's runs, an evaluation's tasks.

`degenerate` in a run's results.json is a sentence of `bertkit.metrics.statistics.constant_baseline_warning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

REMEDY = "try another seed, more epochs, another learning rate or a longer warm-up"


def degenerate_lines(results: Mapping[str, Any]) -> list[str]:
    """Warnings about the runs of a results.json that do no better than a constant prediction.

    For several runs, the first line gives their number and each further line names one.
    """
    runs = _runs(results)
    if not runs:
        return [f"{results['degenerate']}; {REMEDY}"] if isinstance(results.get("degenerate"), str) else []
    failed = [(name, run["degenerate"]) for name, run in runs if run.get("degenerate")]
    if not failed:
        return []
    if len(runs) == 1:
        return [f"{failed[0][0]}: {failed[0][1]}; {REMEDY}"]
    does = "does" if len(failed) == 1 else "do"
    count = f"{len(failed)} of {len(runs)} runs {does} no better than a constant prediction; {REMEDY}:"
    return [count, *(f"  {name}: {reason}" for name, reason in failed)]


def _runs(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The runs of a suite, or of each task of an evaluation, with a name for each."""
    runs = results.get("runs") or ()
    if isinstance(runs, Mapping):
        return [(f"{task}, seed {run['seed']}", run) for task, own in runs.items() for run in own]
    return [(_name(run), run) for run in runs]


def _name(run: Mapping[str, Any]) -> str:
    setting = "".join(f", {key}={value}" for key, value in run.get("setting", {}).items())
    return f"seed {run['seed']}{setting} ({Path(run['run']).name})"
