"""Waiting OpenMP threads sleep if other processes take cores, else spin briefly, unless the environment decides."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bertkit import openmp
from bertkit.openmp import limit_spinning


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("threads", "others", "policy"),
    [
        (None, 0, None),
        (None, 1, "passive"),
        ("2", 1, "passive"),
        ("1", 5, None),
        ("4", 0, "passive"),
        ("all", 0, None),
        ("0", 1, "passive"),
    ],
)
def test_more_threads_than_cores_sleep(
    monkeypatch: pytest.MonkeyPatch, threads: str | None, others: int, policy: str | None
) -> None:
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    limit_spinning(lambda: others)
    assert os.environ.get("OMP_WAIT_POLICY") == policy


@pytest.mark.parametrize(
    ("cores", "others", "rounds"), [(2, 0, "400"), (4, 0, "400"), (5, 0, None), (2, 1, None), (1, 0, None)]
)
def test_few_threads_spin_briefly(monkeypatch: pytest.MonkeyPatch, cores: int, others: int, rounds: str | None) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    limit_spinning(lambda: others)
    assert os.environ.get("GOMP_SPINCOUNT") == rounds


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "active")
    limit_spinning(lambda: 3)
    assert {key: os.environ.get(key) for key in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} == {
        "GOMP_SPINCOUNT": None,
        "OMP_WAIT_POLICY": None,
        name: "active",
    }


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
    limit_spinning()
    assert os.environ.get("OMP_WAIT_POLICY") == policy
