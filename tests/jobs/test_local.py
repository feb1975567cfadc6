"""Jobs in any number of processes return one process's values, and no job is lost with its worker."""

from __future__ import annotations

import logging
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.files import read_json
from bertkit.jobs.executor import ATTEMPTS
from bertkit.jobs.job import Job, JobBugError
from bertkit.jobs.local import LocalExecutor
from bertkit.jobs.manifest import JOBS_FILE, check_files, write_manifest
from bertkit.jobs.registry import executor_of
from bertkit.jobs.settings import ExecutorSettings
from tests.jobs import work


def test_values_come_in_order_from_any_number_of_processes(tmp_path: Path) -> None:
    jobs = [Job(f"job {n}", partial(work.square, n)) for n in range(4)]
    jobs[0] = Job("job 0", partial(work.killed_until, tmp_path / "killed", 1))
    with executor_of(ExecutorSettings(jobs=3)) as executor:
        done = list(executor.run(jobs, ordered=True))
    assert [each.value for each in done] == [1, 1, 4, 9]
    assert [each.attempts for each in done] == [2, 1, 1, 1]
    assert [each.job for each in done] == jobs


def test_short_jobs_share_a_process_and_one_that_is_killed_is_replaced(tmp_path: Path) -> None:
    jobs = [Job(f"job {n}", partial(work.square, n)) for n in range(5)]
    jobs[2] = Job("job 2", partial(work.killed_until, tmp_path / "killed", 1))
    with executor_of(ExecutorSettings(jobs=1), fresh_process=False) as executor:
        done = list(executor.run(jobs, ordered=True, ahead=2))
    assert [each.value for each in done] == [0, 1, 1, 9, 16]
    assert len({each.worker for each in done}) <= 3


def test_a_value_may_be_larger_than_a_pipe_holds() -> None:
    with LocalExecutor(1) as executor:
        (done,) = executor.run([Job("large", partial(work.many_bytes, 7))])
    assert done.value == work.many_bytes(7)


def test_a_worker_that_is_killed_in_the_middle_of_its_reply_is_replaced(tmp_path: Path) -> None:
    with LocalExecutor(1) as executor:
        (done,) = executor.run([Job("cut off", partial(work.dies_while_replying, tmp_path / "died"))])
    assert (done.value, done.attempts) == (1, 2)


def test_a_job_that_kills_every_worker_ends_with_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job("rte-seed=3", partial(work.killed_until, tmp_path / "killed", ATTEMPTS))
    with (
        caplog.at_level(logging.WARNING),
        LocalExecutor(1) as executor,
        pytest.raises(DataError, match=rf"rte-seed=3: lost its worker {ATTEMPTS} times \(process \d+ ended"),
    ):
        list(executor.run([job]))
    assert caplog.text.count("restarting the job") == ATTEMPTS - 1


def test_an_error_is_the_commands_and_ends_the_others(tmp_path: Path) -> None:
    jobs = [Job("waits", partial(work.waits, tmp_path / "begun")), Job("refused", work.refused)]
    with LocalExecutor(2) as executor, pytest.raises(UsageError, match="a fault of the user's"):
        list(executor.run(jobs))
    with LocalExecutor(1) as executor, pytest.raises(JobBugError, match=r"fails: ZeroDivisionError: a bug") as caught:
        list(executor.run([Job("fails", work.fails)]))
    assert "in fails" in "".join(traceback.format_exception(caught.value))


def noted(error: OSError) -> OSError:
    error.__cause__ = RuntimeError("as a library words it")
    error.add_note("it needs 5 bytes or more")
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), r"OSError: \[Errno 28\] No space left on device"),
        (noted(OSError(28, "No space left on device", "a.bin")), r".* device: 'a.bin'; it needs 5 bytes or more \("),
        (MemoryError("Unable to allocate 9 GiB"), "MemoryError: Unable to allocate 9 GiB"),
    ],
)
def test_a_fault_of_a_workers_machine_is_no_bug(error: Exception, told: str) -> None:
    with LocalExecutor(1) as executor, pytest.raises(DataError, match=f"^job 3: {told}"):
        list(executor.run([Job("job 3", partial(work.raises, error))]))


def test_a_reason_to_stop_ends_all(tmp_path: Path) -> None:
    marker = tmp_path / "begun"
    with LocalExecutor(1) as executor, pytest.raises(StoppedError, match="stopped by the time limit"):
        list(
            executor.run(
                [Job("waits", partial(work.waits, marker)), Job("later", work.fails)],
                stop=lambda: "the time limit" if marker.exists() else None,
            )
        )


@pytest.mark.parametrize("fresh_process", [True, False])
def test_a_worker_that_has_saved_its_work_does_not_wait_for_more(tmp_path: Path, fresh_process: bool) -> None:
    marker = tmp_path / "begun"
    with (
        LocalExecutor(1, fresh_process=fresh_process) as executor,
        pytest.raises(StoppedError, match="stopped by the time limit"),
    ):
        list(
            executor.run(
                [Job("saves", partial(work.saves, marker))],
                stop=lambda: "the time limit" if marker.exists() else None,
            )
        )


def test_a_worker_has_the_commands_code_and_its_share_of_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with LocalExecutor(2) as executor:
        (done,) = executor.run([Job("threads", work.threads)])
        assert done.value == 3
        executor.place = replace(executor.place, code="0" * 64)
        with pytest.raises(UsageError, match="has another bertkit"):
            list(executor.run([Job("threads", work.threads)]))
        monkeypatch.undo()
        gone = replace(LocalExecutor(1).place, directory="/nowhere/at/all")
        executor.place = gone
        with pytest.raises(DataError, match="cannot see /nowhere/at/all"):
            list(executor.run([Job("threads", work.threads)]))


def test_jobs_are_recorded_with_the_hashes_of_their_files(tmp_path: Path) -> None:
    jobs = [Job(name, partial(work.written, tmp_path / name, name)) for name in ("b", "a")]
    with LocalExecutor(2) as executor:
        done = list(executor.run(jobs, ordered=True))
    for each in done:
        check_files(each)
    write_manifest(tmp_path, done[:1])
    write_manifest(tmp_path, done[1:])
    recorded = read_json(tmp_path / JOBS_FILE)
    assert list(recorded) == ["a", "b"]
    assert recorded["a"]["files"] == {"a": done[1].value[str(tmp_path / "a")]}
    (tmp_path / "a").write_text("other")
    with pytest.raises(DataError, match=r"a: differs from what .* wrote"):
        check_files(done[1])
    (tmp_path / "a").unlink()
    with pytest.raises(DataError, match="all machines must share the run directory"):
        check_files(done[1])
