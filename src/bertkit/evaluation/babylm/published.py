"""Published scores of the challenge's own baselines, to set beside a model's.

github.com/babylm-org/babylm-eval, strict/README.md and README.md, read at commit 45fe2c11: models trained on the
official ten million words (strict-small), scored by the official pipeline on the full sets. In percent there.
"""

from __future__ import annotations

from typing import Any

SOURCE = "github.com/babylm-org/babylm-eval, README, commit 45fe2c11"
_COLUMNS = ("blimp", "blimp_supplement", "entity_tracking", "comps")
_ROWS: tuple[tuple[str, str, tuple[float | None, ...]], ...] = (
    ("GPT-BERT causal-focus", "causal", (71.66, 63.21, 33.96, None)),
    ("GPT-BERT mixed", "mntp", (71.29, 63.30, 39.95, None)),
    ("GPT-BERT masked-focus", "mntp", (70.36, 63.71, 40.02, None)),
    ("GPT-2 small, 2025", "causal", (67.29, 59.09, 18.92, None)),
    ("GPT-2 small, 2026", "causal", (65.08, 57.25, 21.07, 51.81)),
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
"""By row: figures as fractions."""
