"""What the suites of `bertkit eval` have in common: the model that is asked, and the result's shape.

Own design (contract: `eval`). One file a suite does the rest: blimp.py, mlm.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bertkit.evaluation.run import MeasureRequest
from bertkit.run.directory import RunDirectory


@dataclass(frozen=True)
class EvalRequest(MeasureRequest):
    """What every suite is told.

    Attributes:
        model: a Hub id, a model directory or a run directory.
    """

    model: str


@dataclass(frozen=True)
class Evaluated:
    """What came of it.

    Attributes:
        run: the run directory.
        results: what its results.json holds: the contract's `suite`, `model`, `tasks` and `average`, and more.
    """

    run: RunDirectory
    results: dict[str, Any]

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document of the contract."""
        return {key: self.results[key] for key in ("suite", "model", "tasks", "average")}


def measured_once(value: float | None) -> dict[str, Any]:
    """A metric of a model as it stands: there is one value, and no spread over seeds."""
    return {"mean": value, "std": None, "seeds": [value]}
