"""Stands in for Weights & Biases; see the package above."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

told: list[tuple[str, Any]] = []
failure: Exception | None = None


def _tell(event: str, what: Any = None) -> None:
    if failure is not None:
        raise failure
    print(f"wandb: {event}")
    told.append((event, what))


class Settings:
    def __init__(
        self,
        *,
        reinit: str,
        silent: bool,
        console: str,
        save_code: bool,
        disable_code: bool,
        disable_git: bool,
        disable_job_creation: bool,
        x_disable_meta: bool,
        x_save_requirements: bool,
        finish_timeout: float,
        finish_timeout_raises: bool,
    ) -> None:
        assert (reinit, console, save_code, x_save_requirements) == ("create_new", "off", False, False)
        assert disable_code
        assert disable_git
        assert disable_job_creation
        assert x_disable_meta


class Run:
    offline = False
    dir = str(Path("wandb", "run", "files"))
    url = "https://wandb.example/run"

    def __init__(self, id: str) -> None:
        self.id = id
        self.summary: dict[str, Any] = {}

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        _tell("metric", (name, step_metric))

    def log(self, data: dict[str, Any]) -> None:
        _tell("log", data)

    def finish(self, exit_code: int) -> None:
        _tell("finish", (exit_code, self.summary))


def setup() -> SimpleNamespace:
    return SimpleNamespace(settings=SimpleNamespace(mode=os.environ.get("WANDB_MODE", "online")))


def login(*, verify: bool, prompt: bool) -> bool:
    assert verify
    assert not prompt
    _tell("login")
    return "WANDB_API_KEY" in os.environ


def init(
    *,
    project: str,
    name: str,
    group: str | None,
    job_type: str,
    config: dict[str, Any],
    id: str | None,
    resume: str | None,
    settings: Settings,
) -> Run:
    _tell("init", {"project": project, "name": name, "group": group, "config": config, "id": id, "resume": resume})
    return Run(id or f"new-{len(told)}")
