"""Deleting runs and their checkpoints: runs being written are skipped, and links are not followed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from making import finished_run, stopped_run

from bertkit.errors import DataError, UsageError
from bertkit.files import bytes_in
from bertkit.run.checkpoint import load_newest_checkpoint
from bertkit.run.checkpoint_removal import checkpoint_bytes, drop_checkpoints
from bertkit.run.directory import RunDirectory
from bertkit.run.housekeeping import delete_checkpoints, delete_run, is_older
from bertkit.run.verify import verify_run


def test_a_deleted_run_leaves_what_its_links_name(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "runs")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text.txt").write_text("kept")
    (run.path / "link").symlink_to(tmp_path / "mine")
    (run.checkpoints / "link").symlink_to(tmp_path / "mine")
    taken = bytes_in(run.path)
    assert taken > 0
    delete_run(run)
    assert not run.path.exists()
    assert (tmp_path / "mine" / "text.txt").read_text() == "kept"
    assert bytes_in(run.path) == 0


def test_a_file_that_is_removed_meanwhile_takes_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kept", "temporary"):
        (tmp_path / name).write_text("x")
    walk = os.walk

    def walk_and_lose(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for each in walk(path):
            (tmp_path / "temporary").unlink()
            yield each

    monkeypatch.setattr(os, "walk", walk_and_lose)
    assert bytes_in(tmp_path) == 1


def test_a_run_behind_a_link_is_refused(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "runs")
    (tmp_path / "elsewhere").symlink_to(run.path)
    with pytest.raises(DataError, match="is a link to"):
        delete_run(RunDirectory.open(tmp_path / "elsewhere"))
    assert run.path.exists()


def test_a_run_that_is_being_written_is_refused(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "runs")
    with run.recording(["bertkit"]):
        for delete in (delete_run, delete_checkpoints):
            with pytest.raises(UsageError, match="is writing this run"):
                delete(RunDirectory.open(run.path))
    assert list(run.checkpoints.glob("step-*"))


def test_a_run_in_which_another_is_being_written_is_refused(tmp_path: Path) -> None:
    suite = finished_run(tmp_path / "runs")
    inner = finished_run(suite.path / "runs")
    with inner.recording(["bertkit"]), pytest.raises(UsageError, match="is writing this run"):
        delete_run(RunDirectory.open(suite.path))
    assert inner.model.exists()
    delete_run(RunDirectory.open(suite.path))
    assert not suite.path.exists()


def test_a_finished_run_without_checkpoints_is_still_whole(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "runs")
    delete_checkpoints(run)
    assert not run.checkpoints.exists()
    verify_run(run.path).raise_for_errors()
    delete_checkpoints(run)  # nothing left to delete


def test_a_kill_while_checkpoints_are_deleted_leaves_no_half_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished_run(tmp_path / "runs")
    taken = checkpoint_bytes(run.checkpoints)

    def killed(path: Path) -> None:
        next(each for each in path.rglob("*") if each.is_file()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            delete_checkpoints(run)
    verify_run(run.path).raise_for_errors()
    assert 0 < checkpoint_bytes(run.checkpoints) < taken
    delete_checkpoints(run)
    assert checkpoint_bytes(run.checkpoints) == 0


def test_a_kill_while_the_checkpoints_of_a_run_that_ends_are_removed_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that counts as damaged, from which the run could not be resumed."""
    run = finished_run(tmp_path / "runs")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        drop_checkpoints(run.checkpoints)
    assert load_newest_checkpoint(run.checkpoints) is None
    assert checkpoint_bytes(run.checkpoints) > 0
    drop_checkpoints(run.checkpoints)  # the next end of a run, or `runs prune`, removes what the kill left
    assert checkpoint_bytes(run.checkpoints) == 0
    drop_checkpoints(run.checkpoints)


def test_checkpoints_that_cannot_be_removed_do_not_make_a_run_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    run = finished_run(tmp_path / "runs")
    monkeypatch.setattr(Path, "rename", refused)
    drop_checkpoints(run.checkpoints)
    assert "could not be removed" in caplog.text
    with pytest.raises(OSError, match="Read-only"):
        delete_checkpoints(run)


def test_age_counts_from_the_end_of_a_run(tmp_path: Path) -> None:
    run = stopped_run(tmp_path / "runs", "bert")
    assert is_older(run, None)
    assert is_older(run, 0)
    assert not is_older(run, 0.01)
    run.record["ended"] = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - 3 * 86_400))
    assert is_older(run, 2.9)
    assert not is_older(run, 3.1)


def test_what_was_freed_on_purpose_is_not_missed(tmp_path: Path) -> None:
    from bertkit.run.housekeeping import free_parts

    run = finished_run(tmp_path)
    free_parts(run, ["model"])
    report = verify_run(run.path)
    report.raise_for_errors()
    assert not run.model.exists()
    assert next(check for check in report.checks if check.name == "model").verdict == "not checked"
