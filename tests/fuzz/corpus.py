"""Inputs found by fuzzing, each fixed: the surface's name and the input."""

from __future__ import annotations

from typing import Any

_STUDY = {
    "kind": "study",
    "recipe": "tiny",
    "budget": {"steps": 6},
    "seeds": [0, 1],
    "measures": {"held_out": {"kind": "held-out"}},
}
_CLAIM = {"claim": "it is worse", "source": "a test", "arm": "causal", "measure": "held_out", "expects": "lower"}

CORPUS: list[tuple[str, Any]] = [
    ("recipes", {1: 2, "extends": "bert-tiny"}),
    ("--set", ("objective.²", 1)),
    ("--set", ("objective.0.masked_lm", "\udcff")),
    ("studies", {**_STUDY, "arms": {"": None}, "claims": [_CLAIM]}),
    ("studies", {**_STUDY, "arms": {"": None}, "claims": [{**_CLAIM, "measure": {}}]}),
]
