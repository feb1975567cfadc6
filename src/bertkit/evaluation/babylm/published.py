"""Published scores of the challenge's baselines, for comparison with a model's.

github.com/babylm-org/babylm-eval, strict/README.md and README.md, read at commit 45fe2c11: models trained on the
official ten million words (strict-small), scored by the official pipeline on the full sets, in percent. The rows of
2025 are commented out on the first of the two pages, and have no GLUE.
"""

from __future__ import annotations

from typing import Any

SOURCE = "github.com/babylm-org/babylm-eval, README, commit 45fe2c11"
_COLUMNS = ("blimp", "blimp_supplement", "ewok", "entity_tracking", "comps", "eye_tracking", "self_paced_reading")
_ROWS: tuple[tuple[str, str, tuple[float | None, ...]], ...] = (
    ("GPT-BERT causal-focus", "causal", (71.66, 63.21, 49.49, 33.96, None, 9.89, 3.45)),
    ("GPT-BERT mixed", "mntp", (71.29, 63.30, 49.93, 39.95, None, 9.78, 3.33)),
    ("GPT-BERT masked-focus", "mntp", (70.36, 63.71, 49.95, 40.02, None, 9.40, 3.37)),
    ("GPT-2 small, 2025", "causal", (67.29, 59.09, 49.80, 18.92, None, 0.13, 0.04)),
    ("GPT-2 small, 2026", "causal", (65.08, 57.25, None, 21.07, 51.81, None, None)),
)

BASELINES: tuple[dict[str, Any], ...] = tuple(
    {
        "model": model,
        "backend": backend,
        "figures": {name: value / 100 for name, value in zip(_COLUMNS, values, strict=True) if value is not None},
        "source": SOURCE,
    }
    for model, backend, values in _ROWS
)
"""Scores as fractions, by row."""

ALIKE = {"mlm": ("mlm", "mntp"), "mntp": ("mlm", "mntp"), "causal": ("causal",)}
"""For each official backend, the backends whose baselines are shown: the page has masked models of both kinds in one
table."""
