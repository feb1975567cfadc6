"""Probes: what a finished model has learnt and how it computes; a folder for each kind.

    probing/KIND/__init__.py   its settings, without heavy imports, so that `--help` is fast
    probing/KIND/measure.py    pure functions over tensors and the recorder
    probing/KIND/run.py        probe_KIND(request, settings): reads the data, measures, hands over a `Report`
    probing/KIND/report.py     findings (a sentence, a table, a figure), summary and definitions

Shared: report.py (what a kind hands over), run.py (the request and the run directory).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from bertkit.settings import Settings

STORE_GB = 8.0
"""Disk that hidden states may take where nothing else is given."""


class ProbeSettings(Settings):
    """What decides a probe's result beside models and data; each field is an option of the command line.

    The docstring of a kind's class is the help of its command, a field's description that of its option.

    Attributes:
        kind: the probe's name on the command line and in its results.
    """

    kind: ClassVar[str]

    seed: int = Field(0, ge=0, description="Seed for all random choices.")
