"""A study small enough for tests: two arms of a few steps on generated text, and a tree of its settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from bertkit.study.run import StudyArguments
from tests.overrides import parsed
from tests.training.tiny_run import write_recipe, write_text

PEAK = "optimisation.schedule.peak"
STUDY: dict[str, Any] = {
    "kind": "study",
    "title": "a study for tests",
    "recipe": "tiny",
    "set": {
        "data.layout": {"name": "doc-sentences"},
        "data.sequence_length": 24,
        "data.static_copies": None,
        "optimisation.stages": [],
        "optimisation.schedule": {"name": "linear", "peak": 1e-3},
        "engine.examples": [],
        "engine.pseudo_perplexity_sequences": 0,
        "engine.save_every_steps": 1,
    },
    "budget": {"steps": 6},
    "arms": {"masked": {"set": {"objective": ["masked_lm"]}}, "causal": {"set": {"objective": ["causal_lm"]}}},
    "choose": {"grid": {PEAK: [1e-3, 8e-3]}, "by": "held_out", "budget_share": 0.5, "seed": 9},
    "seeds": [0, 1],
    "measures": {"held_out": {"kind": "held-out"}, "other": {"kind": "mlm", "data": ["other.txt"], "sequences": 12}},
    "claims": [
        {"claim": "it is worse", "source": "a test", "arm": "causal", "measure": "held_out", "expects": "lower"}
    ],
}

ALONE = ("choose=null", "claims=[]", "seeds=[0]", "arms.causal=null")
"""Settings that leave one run of one arm."""


def study(**changes: Any) -> dict[str, Any]:
    """The study with other values of some keys; those of `arms` and `measures` are added."""
    found = deepcopy(STUDY)
    for key, value in changes.items():
        found[key] = {**found[key], **value} if key in ("arms", "measures") else value
    return found


def write_study(home: Path, contents: dict[str, Any] | None = None) -> Path:
    """The study with its recipe and its texts, in a folder."""
    write_recipe(home)
    write_text(home / "other.txt", documents=6, seed=5)
    path = home / "small.yaml"
    path.write_text(yaml.safe_dump(STUDY if contents is None else contents, sort_keys=False), encoding="utf-8")
    return path


def arguments(home: Path, run: str, *sets: str, resume: bool = False, **more: Any) -> StudyArguments:
    """The command line of the study in `home` for its run `run`, which is resumed with `resume`."""
    start: dict[str, Any] = {"resume": str(home / run)} if resume else {"recipe": str(home / "small.yaml")}
    if not resume:
        start |= {"run_dir": home / run, "sources": [str(home / "text.txt")], "data_dir": str(home)}
    defaults = {"cache": home / "cache", "command": ["test"], "overrides": parsed(sets)}
    return StudyArguments(**{**defaults, **start, **more})


def results(home: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / run / "results.json").read_text(encoding="utf-8"))
    return found


def times_of(paths: Sequence[Path]) -> dict[Path, int]:
    """When each was last written."""
    return {path: path.stat().st_mtime_ns for path in paths}
