"""Probes: what a trained model has learned and how it computes. One folder per kind.

    probing/KIND/__init__.py   its settings, without heavy imports, so that `--help` is fast
    probing/KIND/measure.py    pure functions over tensors and the recorder
    probing/KIND/run.py        probe_KIND(request, settings): reads the data, measures, returns a `Report`
    probing/KIND/report.py     findings (a sentence, a table, a figure), summary and definitions

Shared: report.py (what a kind returns), run.py (the request and the run directory), several.py (a probe of one model,
applied to several).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from bertkit.settings import Settings

STORE_GB = 8.0
"""Default limit on the disk space of hidden states, in GB."""

LEAST_SENTENCES = 10
"""Minimum number of sentences to train a probe on."""


class ProbeSettings(Settings):
    """The settings that, along with models and data, determine a probe's result. Each field is a command-line option.

    The docstring of a kind's class is the help text of its command; a field's description is that of its option.

    Attributes:
        kind: the probe's name on the command line and in its results.
        compares_models: whether it compares several models with each other; other probes are applied to each.
    """

    kind: ClassVar[str]
    compares_models: ClassVar[bool] = False

    seed: int = Field(0, ge=0, description="Seed for all random choices.")
