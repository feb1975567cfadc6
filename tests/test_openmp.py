"""Waiting OpenMP threads sleep if other processes take cores, else spin briefly; in a container with a CPU quota there
are no more threads than it allows; unless the environment decides."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bertkit import openmp
from bertkit.jobs.job import threads_of
from bertkit.openmp import (
    cpu_quota,
    limit_spinning,
    limit_threads,
    memory_limit,
    usable_cores,
    warn_of_more_threads,
)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two cores without a quota."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(openmp, "ROOT", tmp_path / "root")
    monkeypatch.setattr(openmp, "_own_count", None)
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


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, contents in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(contents)


V2, V1 = "0::/", "4:memory:/\n3:cpu,cpuacct:/\n"
GROUPS = "sys/fs/cgroup"
QUOTAS = {
    "version 2": (2.0, V2, {"cpu.max": "200000 100000\n"}),
    "a part of a core": (0.05, V2, {"cpu.max": "5000 100000\n"}),
    "unlimited": (None, V2, {"cpu.max": "max 100000\n"}),
    "the group above": (1.5, V2 + "a/b", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}),
    "the smallest": (1.0, V2 + "a/b", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "50000 50000\n"}),
    "a path of the host": (3.0, V2 + "docker/123", {"cpu.max": "300000 100000\n"}),
    "a path outside": (3.0, V2 + "../x", {"cpu.max": "300000 100000\n", "../x/cpu.max": "100000 100000\n"}),
    "version 1": (2.5, V1, {"cpu,cpuacct/cpu.cfs_quota_us": "250000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}),
    "version 1, cpu": (2.5, V1 + V2, {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}),
    "version 1, unlimited": (None, V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}),
    "both": (1.0, V1 + V2, {"cpu/cpu.cfs_quota_us": "-1", "unified/cpu.max": "100000 100000"}),
    "damaged": (None, "nothing\n\n:::\n" + V2, {"cpu.max": "1 0\n"}),
    "no numbers": (None, V2, {"cpu.max": ""}),
    "no files": (None, V2, {}),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_the_quota_is_that_of_the_control_groups(tmp_path: Path, case: str) -> None:
    expected, groups, files = QUOTAS[case]
    write_files(
        tmp_path / "root", {"proc/self/cgroup": groups, **{f"{GROUPS}/{name}": text for name, text in files.items()}}
    )
    assert cpu_quota() == expected


@pytest.mark.parametrize(
    ("expected", "groups", "files"),
    [
        (None, V2, {}),
        (None, V2, {"memory.max": "max\n"}),
        (4_000_000, V2 + "a/b", {"a/b/memory.max": "max\n", "a/memory.max": "4000000\n"}),
        (3_000_000, V1, {"memory/memory.limit_in_bytes": "3000000\n"}),
        (None, V1, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}),
        (None, V1, {"cpu,cpuacct/memory.limit_in_bytes": "3000000\n"}),
    ],
)
def test_the_memory_limit_is_that_of_the_control_groups(
    tmp_path: Path, expected: int | None, groups: str, files: dict[str, str]
) -> None:
    write_files(
        tmp_path / "root", {"proc/self/cgroup": groups, **{f"{GROUPS}/{name}": text for name, text in files.items()}}
    )
    assert memory_limit() == expected


@pytest.mark.parametrize(
    ("quota", "threads", "per_job"), [(150, "2", 1), (5, "1", 1), (400, "4", 2), (6400, None, 32), (20_000, None, 32)]
)
def test_threads_follow_the_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: int, threads: str | None, per_job: int
) -> None:
    """On 64 cores; percent of a core. The number set here is not a wish of the caller: two jobs share it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    write_files(tmp_path / "root", {"proc/self/cgroup": V2, f"{GROUPS}/cpu.max": f"{quota * 1000} 100000\n"})
    limit_threads()
    assert os.environ.get("OMP_NUM_THREADS") == threads
    assert (usable_cores(), threads_of(2)) == (int(threads or 64), per_job)
    limit_spinning(lambda: 7)  # on other cores
    assert os.environ.get("OMP_WAIT_POLICY") == (None if threads else "passive")


def test_a_library_tells_of_more_threads_than_the_quota_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_more_threads.cache_clear()
    warn_of_more_threads(2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    write_files(tmp_path / "root", {"proc/self/cgroup": V2, f"{GROUPS}/cpu.max": "150000 100000\n"})
    warn_of_more_threads.cache_clear()
    warn_of_more_threads(2)
    assert not caplog.records
    for _ in range(2):
        warn_of_more_threads(8)
    (record,) = caplog.records
    assert record.getMessage().startswith("torch has 8 threads, but the CPU quota of this container allows 2;")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    warn_of_more_threads(5)
    assert caplog.records == [record]


def test_given_threads_and_physical_cores_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    write_files(tmp_path / "root", {"proc/self/cgroup": V2, f"{GROUPS}/cpu.max": "600000 100000\n"})
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    limit_threads()
    assert (os.environ["OMP_NUM_THREADS"], threads_of(2)) == ("7", 7)
    limit_spinning(lambda: 0)
    assert os.environ["OMP_WAIT_POLICY"] == "passive"  # seven threads, six cores
    monkeypatch.delenv("OMP_NUM_THREADS")
    write_files(tmp_path / "root", {"sys/devices/system/cpu/smt/active": "1\n"})
    limit_threads()
    assert "OMP_NUM_THREADS" not in os.environ  # torch starts four threads on eight hyperthreads
