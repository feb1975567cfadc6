"""Threads of OpenMP spin for a bounded time, unless the environment says how long."""

from __future__ import annotations

import os

import pytest

from bertkit.openmp import SPINS, bound_spinning


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "active")
    bound_spinning()
    assert os.environ[name] == "active"
    assert ("GOMP_SPINCOUNT" in os.environ) == (name == "GOMP_SPINCOUNT")


def test_spinning_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    bound_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == str(SPINS)
