"""The contents of a report on a run: facts, scores, settings, training curve, and the files of its figures.

Contract: `bertkit report`. Everything is read from the run directory, nothing is recomputed; sibling page.py renders
the page.

A run's files are not trusted: text goes through `visible`, sizes are limited, and a damaged file is left out with a
warning.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bertkit.errors import BertkitError
from bertkit.files import read_json
from bertkit.recipe.tree import read_tree
from bertkit.run.directory import ENVIRONMENT, RECIPE, RunDirectory
from bertkit.run.metrics import metrics_by_step
from bertkit.visible import visible, visible_document

MOST_FIGURE_BYTES = 4_000_000
"""Size above which a figure is only named on the page."""
MOST_TEXT_BYTES = 200_000
_SUMMARIES = ("report.md", "summary.txt")
_NOT_SCORES = (
    "held_out_text",
    "examples",
    "runs",
    "evaluations",
    "looks",
    "degenerate",
    "choice",
    "measures",
    "curves",
)
"""Parts of results.json that are descriptions, not results."""
SCORES = ("splits", "tasks", "held_out")
"""The parts of results.json with the scores of a run, of a suite, and of pretraining."""

Content = TypeVar("Content")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReportedScore:
    """A score from results.json; a mean over seeds if it has a deviation."""

    mean: float
    std: float | None = None

    @property
    def in_words(self) -> str:
        # Of equal numbers, rounding may leave a deviation of some 1e-17.
        spread = "" if self.std is None else f" ± {self.std if self.std > 1e-12 * abs(self.mean) else 0:.2g}"
        mean = f"{self.mean:,.0f}" if self.mean.is_integer() and not spread else f"{self.mean:.4g}"
        return f"{mean}{spread}"


@dataclass(frozen=True)
class ReportedRun:
    """A run prepared for display.

    Attributes:
        name: name of its directory.
        path: path of the directory.
        facts: what was run, where and for how long, by name.
        scores: scores from results.json by dotted name.
        settings: leaves of the recipe by dotted key, as text.
        recipe: the whole recipe as text.
        curve: metrics from metrics.jsonl, one mapping per step.
        figures: SVG files of the run.
        left_out: figures that are too large.
        summary: the summary text of a probe or a study.
        commands: commands to rerun and to check the run.
    """

    name: str
    path: Path
    facts: Mapping[str, str]
    scores: Mapping[str, ReportedScore]
    settings: Mapping[str, str]
    recipe: str
    curve: Sequence[Mapping[str, Any]]
    figures: Sequence[Path]
    left_out: Sequence[str]
    summary: str
    commands: Sequence[str]

    @property
    def main_scores(self) -> Mapping[str, ReportedScore]:
        """The scores of the model, without counts, per-class figures and the like; all if there are none of a known
        kind."""
        for part in SCORES:
            if found := {name: each for name, each in self.scores.items() if name.startswith(f"{part}.")}:
                return found
        return self.scores

    @classmethod
    def of(cls, run: RunDirectory) -> ReportedRun:
        """Read a run of any kind and status.

        Raises:
            DataError: its recipe cannot be read.
        """
        drawn = sorted((run.path / "figures").glob("*.svg"))
        small = [path for path in drawn if path.stat().st_size <= MOST_FIGURE_BYTES]
        recipe = run.recipe_yaml
        return cls(
            name=visible(run.id),
            path=run.path,
            facts=_facts(run),
            scores=dict(_scores("", _read(run, lambda: run.results) or {})),
            settings=dict(_leaves("", read_tree(recipe, str(run.path / RECIPE)).plain())),
            recipe=visible_document(recipe),
            curve=_read(run, lambda: metrics_by_step(run.metrics)) or (),
            figures=small,
            left_out=[visible(path.name) for path in drawn if path not in small],
            summary=_summary(run.path),
            commands=_commands(run),
        )


def _read(run: RunDirectory, read: Callable[[], Content]) -> Content | None:
    """The content that a function reads; None, with a warning, if its file is damaged."""
    try:
        return read()
    except BertkitError as error:
        log.warning("%s: left out of the report: %s", run.path, error)
        return None


def _facts(run: RunDirectory) -> dict[str, str]:
    record = run.record
    path = run.path / ENVIRONMENT
    environment = _read(run, lambda: read_json(path)) if path.exists() else None
    found = environment or {}
    git, cpu = found.get("git") or {}, found.get("cpu") or {}
    gpus = ", ".join(str(each.get("name")) for each in found.get("gpus") or ())
    flops = record.get("flops")
    rows: dict[str, Any] = {
        "status": run.status if run.status == "done" else f"{run.status}: {run.exit_reason}",
        "command": record["kind"],
        "recipe": record["recipe"],
        "seed": record.get("seed"),
        "started": str(record["started"])[:16].replace("T", " "),
        "took": _took(run),
        "steps": f"{run.steps:,}" if run.steps else None,
        "tokens": f"{record['tokens']:,}" if record.get("tokens") else None,
        "training FLOPs": f"{flops:.3g}" if flops else None,
        "processor": cpu.get("model"),
        "threads": (found.get("threads") or {}).get("intra_op"),
        "GPU": gpus or None,
        "bertkit, torch": f"{found['bertkit']}, {found['packages'].get('torch')}" if "packages" in found else None,
        "commit": f"{git['commit'][:12]}{' with changes' if git.get('dirty') else ''}" if git.get("commit") else None,
        "hash of the recipe": record["what_hash"][:16],
        "hash of the text": (record["fingerprints"].get("data") or "")[:16] or None,
        "attempts": len(record["attempts"]) if len(record["attempts"]) > 1 else None,
    }
    return {name: visible(str(value)) for name, value in rows.items() if value is not None}


def _took(run: RunDirectory) -> str | None:
    """Hours and minutes between the start and the end of all attempts."""
    try:
        seconds = run.seconds_before()
    except (KeyError, TypeError, ValueError):
        return None
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{seconds:.0f} s" if seconds < 120 else f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _scores(prefix: str, value: Any) -> Iterator[tuple[str, ReportedScore]]:
    """Numbers of a document by dotted name; a mapping with a mean counts as one number."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        if math.isfinite(value):
            yield visible(prefix), ReportedScore(float(value))
    elif isinstance(value, Mapping):
        mean, std = value.get("mean"), value.get("std")
        if isinstance(mean, int | float):
            yield visible(prefix), ReportedScore(float(mean), std if isinstance(std, int | float) else None)
            return
        if mean is None and "mean" in value:  # undefined; its other numbers are counts of runs
            return
        for name, each in value.items():
            if prefix or name not in _NOT_SCORES:
                yield from _scores(f"{prefix}.{name}" if prefix else str(name), each)


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Settings by dotted key; a list counts as one setting, unless it contains objectives or other named mappings."""
    if isinstance(value, list) and any(isinstance(each, Mapping) and len(each) == 1 for each in value):
        for each in value:
            yield from _leaves(prefix, each if isinstance(each, Mapping) else {str(each): "-"})
    elif isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), each)
    else:
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        yield visible(prefix), visible(shown)


def _summary(path: Path) -> str:
    for name in _SUMMARIES:
        file = path / name
        if file.is_file() and file.stat().st_size <= MOST_TEXT_BYTES:
            lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
            return visible_document("\n".join(line for line in lines if not line.startswith("![")).strip())
    return ""


def _commands(run: RunDirectory) -> list[str]:
    kind, path = run.record["kind"], shlex.quote(str(run.path))
    trains = kind in ("pretrain", "finetune", "distill") and not (_read(run, lambda: run.results) or {}).get("runs")
    if not trains:
        return [f"bertkit runs verify {path}"]
    return [
        f"bertkit runs verify {path}",
        f"bertkit runs replay {path}",
        f"bertkit {kind} {shlex.quote(str(run.path / RECIPE))} --fresh",
    ]


def different_settings(runs: Sequence[ReportedRun]) -> dict[str, list[str]]:
    """Keys whose values differ between the recipes, with the value in each run; empty if a run has none."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    values = {key: [run.settings.get(key, "") for run in runs] for key in keys if key not in ("name", "title")}
    return {key: found for key, found in values.items() if len(set(found)) > 1}
