"""`bertkit cache` counts exactly what runs have cached and deletes nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.training.tiny_run import write_text

from bertkit.cache import lock_of_shards
from bertkit.files import one_at_a_time
from bertkit.run.directory import RunDirectory, RunIdentity, write_record

Bertkit = Callable[..., Any]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache with a user's file next to the kinds, and runs below the same directory."""
    root = tmp_path / "cache"
    monkeypatch.setenv("BERTKIT_CACHE", str(root))
    monkeypatch.setenv("BERTKIT_RUNS", str(tmp_path / "runs"))
    for kind, names in {"shards": ("a", "b"), "teachers": ("c",), "mine": ("d",)}.items():
        for name in names:
            (root / kind / name).mkdir(parents=True)
            (root / kind / name / "values.bin").write_bytes(b"x" * 1500)
    (root / "plans").mkdir()
    (root / "plans" / "e.npy").write_bytes(b"y" * 10)
    return root


def test_info_counts_each_kind(cache: Path, bertkit: Bertkit) -> None:
    found = json.loads(bertkit("cache", "info", "--json").stdout)
    assert (found["path"], found["bytes"]) == (str(cache), 4510)
    assert found["kinds"]["shards"] == {"entries": 2, "bytes": 3000}
    assert found["kinds"]["pydocs"] == {"entries": 0, "bytes": 0}
    shown = bertkit("cache", "info")
    assert shown.stdout == f"{cache}: 4.5 kB\n"
    assert "token shards of texts" in shown.stderr


def test_files_that_a_run_removes_meanwhile_are_no_fault(
    cache: Path, bertkit: Bertkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    glob = Path.glob

    def glob_and_lose(path: Path, pattern: str) -> Any:
        found = list(glob(path, pattern))
        for each in found:
            if each.name == "values.bin":
                each.unlink()
        return found

    monkeypatch.setattr(Path, "glob", glob_and_lose)
    done = bertkit("cache", "info")
    assert done.code == 0, done.stderr


def test_clear_deletes_the_kinds_that_are_named(cache: Path, bertkit: Bertkit) -> None:
    assert "would delete 2 entries, 3.0 kB" in bertkit("cache", "clear", "shards", "--dry-run").stdout
    assert (cache / "shards" / "a").exists()
    found = json.loads(bertkit("cache", "clear", "shards", "plans", "--yes", "--json").stdout)
    assert (found["bytes"], len(found["paths"])) == (3010, 3)
    assert [path.name for path in (cache / "shards").iterdir()] == []
    assert (cache / "teachers" / "c" / "values.bin").exists()


@pytest.mark.parametrize("place", ["runs/one", "runs/study/runs/seed=0", "cache/stored-runs/0123/one"])
def test_clear_keeps_the_shards_that_a_running_run_reads(
    cache: Path, tmp_path: Path, place: str, bertkit: Bertkit
) -> None:
    identity = RunIdentity("pretrain", "tiny", "name: tiny\n", "0" * 64, 3, ["test"])
    with ExitStack() as running:
        for path in sorted({tmp_path / place.replace("/runs/seed=0", ""), tmp_path / place}):  # the outer run first
            run = RunDirectory.create(tmp_path, identity, path)
            running.enter_context(run.recording())
        run = RunDirectory.open(tmp_path / place)
        write_record(run.path, {**run.record, "shards": str(cache / "shards" / "a")})
        assert bertkit("cache", "clear", "shards", "--yes").code == 0
    assert [path.name for path in (cache / "shards").iterdir()] == ["a"]


def test_clear_keeps_the_shards_that_are_being_written(cache: Path, bertkit: Bertkit) -> None:
    lock = lock_of_shards(cache / "shards" / "a", cache)
    lock.parent.mkdir()
    lock_of_shards(cache / "shards" / "b", cache).touch()  # of a process that has ended
    with one_at_a_time(lock, cache / "shards" / "a"):
        assert bertkit("cache", "clear", "shards", "--yes").code == 0
    assert [path.name for path in (cache / "shards").iterdir()] == ["a"]
    assert bertkit("cache", "clear", "shards", "--yes").code == 0
    assert not list((cache / "shards").iterdir())


def test_clear_never_deletes_what_is_no_cache(cache: Path, tmp_path: Path, bertkit: Bertkit) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "text.txt").write_text("kept")
    (cache / "shards" / "link").symlink_to(tmp_path / "outside")
    (cache / "students").symlink_to(tmp_path / "outside")
    assert bertkit("cache", "clear", "--yes").code == 0
    assert (cache / "mine" / "d" / "values.bin").exists()
    assert (tmp_path / "outside" / "text.txt").read_text() == "kept"
    assert not (cache / "shards" / "link").is_symlink()


def test_without_a_terminal_consent_is_an_option(
    cache: Path, bertkit: Bertkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    refused = bertkit("cache", "clear")
    assert refused.code == 2
    assert "--yes" in refused.stderr
    assert bertkit("cache", "clear", "shard").code == 2
    assert (cache / "shards" / "a").exists()


def test_all_that_a_run_caches_is_counted(tmp_path: Path, bertkit: Bertkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path / "own"))
    write_text(tmp_path / "text.txt", documents=60)
    words = ["--set", "tokenizer.vocab_size=150", "--max-steps", "2", "--set", "optimisation.batch_sequences=4"]
    assert bertkit("pretrain", "bert-tiny", "--data", "text.txt", *words).code == 0
    kinds = json.loads(bertkit("cache", "info", "--json").stdout)["kinds"]
    assert kinds["shards"]["entries"] == 1
    assert kinds["plans"]["entries"] > 0
    known = {*kinds, "locks", "file-hashes.json"}
    assert {path.name for path in (tmp_path / "own").iterdir()} <= known
    assert bertkit("cache", "clear", "--yes").code == 0
    assert bertkit("pretrain", "bert-tiny", "--data", "text.txt", *words).code == 0
