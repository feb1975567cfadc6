"""Threads of OpenMP sleep while they wait where other processes take cores, unless the environment decides it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bertkit import openmp
from bertkit.openmp import sleep_where_cores_are_shared


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("threads", "others", "policy"),
    [(None, 0, None), (None, 1, "passive"), ("2", 1, "passive"), ("1", 5, None), ("4", 0, "passive"), ("all", 0, None)],
)
def test_more_threads_than_cores_sleep(
    monkeypatch: pytest.MonkeyPatch, threads: str | None, others: int, policy: str | None
) -> None:
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    sleep_where_cores_are_shared(lambda: others)
    assert os.environ.get("OMP_WAIT_POLICY") == policy


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "active")
    sleep_where_cores_are_shared(lambda: 3)
    assert os.environ.get("OMP_WAIT_POLICY") == ("active" if name == "OMP_WAIT_POLICY" else None)


@pytest.mark.parametrize(
    ("load", "policy"),
    [("0.1 0.1 0.1 1/90 7\n", None), ("2.0 1.0 1.0 3/90 7\n", "passive"), ("nothing", None), (None, None)],
)
def test_others_are_counted_by_the_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load: str | None, policy: str | None
) -> None:
    file = tmp_path / "loadavg"
    if load is not None:
        file.write_text(load, encoding="ascii")
    monkeypatch.setattr(openmp, "LOAD", file)
    sleep_where_cores_are_shared()
    assert os.environ.get("OMP_WAIT_POLICY") == policy
