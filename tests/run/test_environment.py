"""The names in environment.json that differ between systems."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from bertkit.run import environment


@pytest.mark.parametrize("answers", [True, False])
def test_an_apple_processor_is_named_by_its_system(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    def sysctl(command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        if not answers:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, "Apple M2 Pro\n", "")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(environment.subprocess, "run", sysctl)
    monkeypatch.setattr(environment.Path, "read_text", lambda *_, **__: "")
    monkeypatch.setattr(environment.platform, "processor", lambda: "arm")
    assert environment.device_name(torch.device("cpu")) == ("Apple M2 Pro" if answers else "arm")
