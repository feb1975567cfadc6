"""Runs are found by name and in order, and `--resume` takes the right one.

Properties of bertkit.run.find.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from making import HASH, finished_run, stopped_run

from bertkit.errors import DataError, UsageError
from bertkit.run import NEWEST
from bertkit.run.directory import RunDirectory
from bertkit.run.find import find_run, find_runs, run_to_resume


def test_runs_are_found_newest_first_and_a_damaged_record_is_passed_over_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []
    for name in ("a", "c", "b"):
        runs.append(stopped_run(tmp_path, name))
        time.sleep(0.002)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text('{"format": 1, "ki')
    (tmp_path / "no-run").mkdir()
    assert [run.id for run in find_runs(tmp_path)] == [run.id for run in reversed(runs)]
    assert "broken/run.json" in caplog.text
    assert find_runs(tmp_path / "missing") == []


def test_bare_resume_takes_the_newest_unfinished_run_that_fits(
    tmp_path: Path, living_writer, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "runs"

    def same(runs: Sequence[RunDirectory]) -> list[RunDirectory]:
        return [run for run in runs if run.record["what_hash"] == HASH]

    with pytest.raises(UsageError, match="no unfinished run to resume"):
        run_to_resume(NEWEST, root, "pretrain")
    assert "a running process is writing it" in caplog.text
    old = stopped_run(root)
    time.sleep(0.002)
    new = stopped_run(root)
    time.sleep(0.002)
    other = stopped_run(root, what_hash="f" * 64)
    finished_run(root)
    assert run_to_resume(NEWEST, root, "pretrain", fitting=same).id == new.id != old.id
    assert run_to_resume(NEWEST, root, "pretrain").id == other.id
    with pytest.raises(UsageError, match="no unfinished run to resume"):
        run_to_resume(NEWEST, root, "finetune")


def test_a_bare_resume_with_a_directory_means_the_run_there(tmp_path: Path) -> None:
    run, newer = stopped_run(tmp_path), stopped_run(tmp_path)
    assert run_to_resume(NEWEST, tmp_path, "pretrain", run_dir=run.path).id == run.id
    assert run_to_resume(newer.id, tmp_path, "pretrain", run_dir=run.path).id == newer.id
    with pytest.raises(UsageError, match="is a run of `bertkit pretrain`"):
        run_to_resume(NEWEST, tmp_path, "finetune", run_dir=run.path)


def test_a_named_run_of_another_command_is_not_resumed(tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    assert run_to_resume(run.id, tmp_path, "pretrain").id == run.id
    with pytest.raises(UsageError, match="is a run of `bertkit pretrain`, which resumes it"):
        run_to_resume(run.id, tmp_path, "finetune")


def test_a_run_is_found_by_path_or_id_and_a_wrong_name_gets_the_nearest(tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    assert find_run(str(run.path), Path("elsewhere")).id == run.id
    assert find_run(run.id, tmp_path).id == run.id
    with pytest.raises(DataError, match=f"did you mean {run.id}"):
        find_run("bert-tiny-01234568", tmp_path)
    with pytest.raises(DataError, match="runs list"):
        find_run("zzz", tmp_path)
    with pytest.raises(DataError, match=r"has no run\.json"):
        find_run(str(tmp_path), tmp_path)


def test_a_run_on_a_store_is_to_be_copied_first(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"s3://bucket/run: runs are read from disks only; copy it first"):
        find_run("s3://bucket/run", tmp_path)
