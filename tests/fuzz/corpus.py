"""Inputs that an attack found, each mended: the surface's name and the input."""

from __future__ import annotations

from typing import Any

CORPUS: list[tuple[str, Any]] = [
    ("recipes", {1: 2, "extends": "bert-tiny"}),
    ("--set", ("objective.²", 1)),
    ("--set", ("objective.0.masked_lm", "\udcff")),
]
