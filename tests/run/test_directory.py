"""Run directories: names, status after every kind of end, one writer at a time.

Properties of bertkit.run.directory, lock and log; processes are really killed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from making import HASH, WRITER, finished_run, identity, stopped_run

import bertkit.run.directory as module
from bertkit.errors import BertkitError, DataError, DivergedError, StoppedError, UsageError
from bertkit.files import finite, sha256_of, write_json, write_text
from bertkit.run.directory import RunDirectory
from bertkit.run.lock import RunLock, is_locked


def test_a_run_is_named_by_recipe_and_hash_and_repeats_are_counted(tmp_path: Path) -> None:
    names = [RunDirectory.create(tmp_path, identity()).id for _ in range(3)]
    assert names == ["bert-tiny-01234567", "bert-tiny-01234567-2", "bert-tiny-01234567-3"]


def test_the_record_holds_what_the_contract_lists(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    record = json.loads((run.path / "run.json").read_text())
    assert record["id"] == run.id
    assert (record["kind"], record["status"], record["exit_reason"]) == ("pretrain", "done", "finished")
    assert record["started"] < record["ended"]
    assert (record["what_hash"], record["seed"], record["steps"], record["tokens"]) == (HASH, 3, 5, 500)
    assert record["command"] == ["bertkit", "pretrain", "bert-tiny"]
    assert record["fingerprints"] == {"data": "d" * 64, "tokenizer": "t" * 64, "model": None}
    assert record["model_sha256"]["model.safetensors"] == sha256_of(run.model / "model.safetensors")
    assert run.recipe_yaml == "name: bert-tiny\nseed: 3\n"
    assert RunDirectory.open(run.path).record == run.record


def test_a_named_directory_is_used_when_new_or_empty_and_refused_otherwise(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / ".DS_Store").write_bytes(b"Bud1")  # macOS
    for name in ("new/deep", "empty", "seen"):
        assert RunDirectory.create(tmp_path, identity(), tmp_path / name).path == tmp_path / name
    with pytest.raises(UsageError, match=r"already contains a run.*--resume"):
        RunDirectory.create(tmp_path, identity(), tmp_path / "empty")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match=r"contains other files \(thesis.txt\)"):
        RunDirectory.create(tmp_path, identity(), tmp_path / "mine")
    with pytest.raises(UsageError, match="is a file"):
        RunDirectory.create(tmp_path, identity(), tmp_path / "mine" / "thesis.txt")


def refused(
    run: RunDirectory, *written: str, error: type[BertkitError] = UsageError, cause: Exception | None = None
) -> Path:
    """The directory of a run that is refused after it has written these files."""

    def train() -> None:
        run.write_environment()
        for name in written:
            (run.path / name).parent.mkdir(exist_ok=True)
            (run.path / name).write_text("{}")
        raise error("model.num_hidden_layers: cannot grow") from cause

    with pytest.raises(error, match="cannot grow"), run.recording():
        train()
    return run.path


def test_a_new_run_that_is_refused_before_its_first_step_leaves_no_directory(tmp_path: Path) -> None:
    assert not refused(RunDirectory.create(tmp_path / "runs", identity())).exists()
    assert not refused(RunDirectory.create(tmp_path / "runs", identity()), error=DataError).exists()
    # The disk or the network may have failed, so --resume may help.
    failed = refused(RunDirectory.create(tmp_path / "runs", identity()), error=DataError, cause=OSError("disk full"))
    assert failed.exists()
    assert not refused(RunDirectory.create(tmp_path, identity(), tmp_path / "named"), "suite.json").exists()
    (tmp_path / "mine").mkdir()
    assert list(refused(RunDirectory.create(tmp_path, identity(), tmp_path / "mine")).iterdir()) == []
    RunDirectory.create(tmp_path, identity(), tmp_path / "mine")


@pytest.mark.parametrize("written", ["metrics.jsonl", "thesis.txt", "runs/seed=0"])
def test_a_refused_run_stays_if_its_directory_contains_anything_else(tmp_path: Path, written: str) -> None:
    path = refused(RunDirectory.create(tmp_path, identity()), written)
    assert (path / written).is_file()
    assert RunDirectory.open(path).status == "failed"
    again = f"it failed \\(model.num_hidden_layers: cannot grow\\); .*--resume.*runs delete {path}"
    with pytest.raises(UsageError, match=again):
        RunDirectory.create(tmp_path, identity(), path)


def test_a_resumed_run_that_is_refused_stays(tmp_path: Path) -> None:
    assert (refused(RunDirectory.open(stopped_run(tmp_path).path)) / "run.json").is_file()


def test_a_recipe_of_the_users_own_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("title: mine\n")
    with pytest.raises(UsageError, match=r"contains other files \(recipe.yaml\)"):
        RunDirectory.create(tmp_path, identity(), tmp_path)
    assert (tmp_path / "recipe.yaml").read_text() == "title: mine\n"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (StoppedError("time limit"), "stopped", "time limit"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
        (DivergedError("loss is NaN at step 3"), "failed", "loss is NaN at step 3"),
        (ZeroDivisionError("division by zero"), "failed", "ZeroDivisionError: division by zero"),
    ],
)
def test_every_end_is_recorded_with_its_reason_and_raised_on(
    tmp_path: Path, error: BaseException, status: str, reason: str
) -> None:
    run = RunDirectory.create(tmp_path, identity())

    def train() -> None:
        assert run.status == "running"
        assert run.exit_reason is None
        raise error

    with pytest.raises(type(error)), run.recording():
        train()
    again = RunDirectory.open(run.path)
    assert (again.status, again.exit_reason) == (status, reason)
    assert reason in run.log_file.read_text()


def test_a_resumed_run_keeps_the_history_of_its_attempts(tmp_path: Path) -> None:
    run = RunDirectory.open(stopped_run(tmp_path).path)
    with run.recording(["bertkit", "pretrain", "--resume"]):
        run.update(steps=9)
    first, second = RunDirectory.open(run.path).record["attempts"]
    assert (first["status"], first["steps"], first["command"][-1]) == ("stopped", 7, "bert-tiny")
    assert (second["status"], second["steps"], second["command"][-1]) == ("done", 9, "--resume")


def test_a_run_took_the_seconds_of_all_its_attempts_whose_end_is_known(tmp_path: Path) -> None:
    run = RunDirectory.open(stopped_run(tmp_path).path)
    stopped = {"started": "2026-01-01T23:59:58.500+00:00", "ended": "2026-01-02T00:01:00.000+00:00"}
    with run.recording():
        run.update(attempts=[stopped, {**stopped, "ended": None}, stopped, run.record["attempts"][-1]])
        assert run.seconds_before() == 2 * 61.5


def test_the_log_file_gets_what_the_package_logs_only_while_recording(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, identity())
    logger = logging.getLogger("bertkit.training.anything")
    logger.warning("before")
    with run.recording():
        logger.info("within, %s", "é")
    logger.warning("after")
    text = run.log_file.read_text(encoding="utf-8")
    assert "within, é" in text
    assert "before" not in text
    assert "after" not in text


def test_a_killed_run_is_stopped_and_can_be_recorded_at_once(living_writer) -> None:
    path, process = living_writer
    run = RunDirectory.open(path)
    assert run.status == "running"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert run.status == "stopped"
    assert "killed" in (run.exit_reason or "")
    with run.recording():
        pass
    ended = RunDirectory.open(path).record["attempts"]
    assert [attempt["status"] for attempt in ended] == ["stopped", "done"]


def test_a_data_worker_that_outlives_its_trainer_does_not_hold_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent), "fork"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        group = os.getpgid(process.pid)
        process.kill()
        process.wait()
        try:
            os.killpg(group, 0)  # the worker lives
            assert RunDirectory.open(path).status == "stopped"
            RunLock(path).release()
        finally:
            os.killpg(group, signal.SIGKILL)


def test_two_processes_never_record_one_run(living_writer) -> None:
    path, process = living_writer
    before = (path / "run.json").read_bytes()
    started = time.monotonic()
    with pytest.raises(UsageError, match=rf"process {process.pid} on .*--run-dir"), RunDirectory.open(path).recording():
        pytest.fail("recorded next to another process")
    assert time.monotonic() - started < 5
    assert (path / "run.json").read_bytes() == before


def test_one_process_does_not_lock_a_run_twice_and_asking_does_not_unlock_it(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    assert is_locked(tmp_path)
    with pytest.raises(UsageError, match="this process"):
        RunLock(tmp_path / ".." / tmp_path.name)
    code = "import sys, pathlib, bertkit.run.lock as lock; print(lock.is_locked(pathlib.Path(sys.argv[1])))"
    ask = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.check_output(ask, text=True).strip() == "True"
    lock.release()
    lock.release()
    assert subprocess.check_output(ask, text=True).strip() == "False"
    RunLock(tmp_path).release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 9}', b'{"format": 1, "kind": 3}', b"\xff\x00"])
def test_a_damaged_record_is_a_data_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    run = stopped_run(tmp_path)
    (run.path / "run.json").write_bytes(content)
    with pytest.raises(DataError, match=r"run\.json"):
        RunDirectory.open(run.path)


def test_a_recipe_that_is_not_text_is_damaged(tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    (run.path / "recipe.yaml").write_bytes(b"kind: \xff")
    with pytest.raises(DataError, match=r"recipe\.yaml: not UTF-8 text \(byte 6\), so it is damaged"):
        assert run.recipe_yaml


def test_steps_of_a_killed_run_come_from_its_metrics(tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    run.metrics.write_text('{"step": 6}\n{"step": 11}\n{"step": 12, "lo')
    assert run.steps == 11


def test_a_full_disk_at_the_end_does_not_hide_the_fault_that_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def train() -> None:
        monkeypatch.setattr(module, "write_self_hashed", refuse)
        raise DivergedError("the fault")

    run = RunDirectory.create(tmp_path, identity())
    with pytest.raises(BertkitError, match="the fault"), run.recording():
        train()
    assert "could not be recorded" in caplog.text
    assert RunDirectory.open(run.path).status == "stopped"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_json_holds_no_nan() -> None:
    value = {"a": float("nan"), "b": [1.5, float("inf"), (float("-inf"), True)], "c": "nan"}
    assert finite(value) == {"a": None, "b": [1.5, None, [None, True]], "c": "nan"}


def test_the_environment_of_each_attempt_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped_run(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:word@hub.example/x")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run.write_environment()
    run.write_environment()
    text = (run.path / "environment.json").read_text()
    assert "hf_secret" not in text
    assert "word" not in text
    first = json.loads(text)
    assert "earlier" not in first
    assert first["variables"]["HF_ENDPOINT"] == "https://hub.example/x"
    assert first["packages"]["torch"].startswith("2.")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    run.write_environment()
    second = json.loads((run.path / "environment.json").read_text())
    assert second["variables"]["OMP_NUM_THREADS"] == "2"
    assert second["earlier"] == [first]


def test_git_state_tells_commit_and_change(tmp_path: Path) -> None:
    from bertkit.run.environment import git_state

    def git(*words: str) -> None:
        identity_words = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity_words, *words], check=True, capture_output=True)

    git("init")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-m", "x")
    state = git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "f").write_text("2")
    assert git_state(tmp_path) == state | {"dirty": True}


def test_looking_at_runs_imports_nothing_heavy() -> None:
    code = (
        "import sys, bertkit.run.directory, bertkit.cli.runs; print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_a_directory_in_which_a_run_was_killed_as_it_began_is_taken_by_the_next(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    for name in (".lock", ".recipe.yaml.123.tmp", "recipe.yaml", ".run.json.123.tmp"):
        (place / name).write_text("half")
    run = RunDirectory.create(tmp_path, identity(), place)
    with run.recording():
        pass
    assert sorted(path.name for path in place.iterdir()) == sorted(
        [".lock", "files.json", "log.txt", "recipe.yaml", "run.json"]
    )


def test_a_full_disk_as_a_run_begins_is_an_error_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bertkit.run import seal

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = RunDirectory.create(tmp_path, identity())
    monkeypatch.setattr(seal, "write_self_hashed", refuse)
    with pytest.raises(OSError, match="No space left"), run.recording():
        raise AssertionError("it does not begin")
    assert RunDirectory.open(run.path).status == "failed"


def test_a_finished_run_is_not_written_over_and_the_remedy_is_to_delete_it(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, identity(), tmp_path / "done")
    with run.recording():
        run.write_results({})
    with pytest.raises(UsageError, match=r"it is done: name another --run-dir, or delete it with `bertkit runs delete"):
        RunDirectory.create(tmp_path, identity(), tmp_path / "done")


def test_the_command_that_continues_a_stopped_run_has_its_path_in_quotes(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, identity(), tmp_path / "my run")
    with pytest.raises(KeyboardInterrupt), run.recording():
        raise KeyboardInterrupt
    with pytest.raises(UsageError, match=r"continue with `--resume '.*/my run'`, name another"):
        RunDirectory.create(tmp_path, identity(), tmp_path / "my run")
