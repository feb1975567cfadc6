"""Stands in for MLflow; see the package above."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

told: list[tuple[str, Any]] = []
failure: Exception | None = None


def _tell(event: str, what: Any = None) -> None:
    if failure is not None:
        raise failure
    print(f"mlflow: {event}")
    told.append((event, what))


class _Param(NamedTuple):
    key: str
    value: str


class _Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


entities = SimpleNamespace(Param=_Param, Metric=_Metric)


def get_tracking_uri() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")


def set_experiment(experiment_name: str | None = None, experiment_id: str | None = None) -> SimpleNamespace:
    _tell("experiment", experiment_name or experiment_id)
    return SimpleNamespace(experiment_id="7")


class MlflowClient:
    def create_run(self, experiment_id: str, *, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        assert experiment_id == "7"
        _tell("create", (run_name, tags))
        return SimpleNamespace(info=SimpleNamespace(run_id=f"new-{len(told)}"))

    def log_batch(self, run_id: str, metrics: list[_Metric] = (), params: list[_Param] = ()) -> None:  # type: ignore[assignment]  # as the real one
        for key in (each.key for each in (*metrics, *params)):
            assert re.fullmatch(r"[\w\-. :/]{1,250}", key), key
        assert len(params) <= 100
        assert all(isinstance(each.value, str) and len(each.value) <= 6000 for each in params)
        _tell("params" if params else "metrics", [tuple(each) for each in params or metrics])

    def update_run(self, run_id: str, status: str) -> None:
        _tell("update", (run_id, status))

    def set_terminated(self, run_id: str, status: str) -> None:
        _tell("end", status)
