"""`runs verify` finds and names any damage to a run, and finds none in an intact one.

Properties of bertkit.run.verify.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from making import finished_run, stopped_run

from bertkit.errors import CheckError, DataError
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.run.metrics import MetricsLog
from bertkit.run.verify import verify_run

FILES = [
    "recipe.yaml",
    "results.json",
    "model/config.json",
    "model/model.safetensors",
    "checkpoints/step-00000005/model.safetensors",
    "checkpoints/step-00000004/state.json",
    "checkpoints/step-00000004/manifest.json",
]


def test_a_whole_run_has_no_fault_and_says_what_was_not_checked(tmp_path: Path) -> None:
    report = verify_run(finished_run(tmp_path).path)
    report.raise_for_errors()
    verdicts = {check.name: check.verdict for check in report.checks}
    assert verdicts.pop("shards") == "not checked"
    assert set(verdicts.values()) == {"ok"}


def test_a_stopped_run_without_checkpoints_is_no_fault(tmp_path: Path) -> None:
    verify_run(stopped_run(tmp_path).path).raise_for_errors()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [cut, append, Path.unlink])
def test_any_harm_to_any_sealed_file_is_found_and_named(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    run = finished_run(tmp_path)
    harm(run.path / name)
    report = verify_run(run.path)
    assert len(report.errors) == 1
    with pytest.raises(CheckError) as caught:
        report.raise_for_errors()
    assert str(run.path / name) in str(caught.value)
    assert caught.value.exit_code == 5


def test_a_broken_environment_metrics_and_latest_are_found(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    (run.path / "environment.json").write_text("{")
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "loss": 1}\n')
    (run.checkpoints / "latest").write_text("step-00000001\n")
    errors = verify_run(run.path).errors
    assert len(errors) == 3
    for part, fault in zip(("environment.json", "line 6: step 2 after step 5", "latest"), errors, strict=True):
        assert part in fault


def test_something_else_than_a_run_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run directory"):
        verify_run(tmp_path)


def test_the_token_shards_of_a_run_are_found_gone_damaged_or_other(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    run = finished_run(tmp_path, shards=str(shards))

    def check() -> tuple[str, str]:
        found = next(check for check in verify_run(run.path).checks if check.name == "shards")
        return found.verdict, found.detail

    verdict, detail = check()
    assert (verdict, str(shards) in detail) == ("not checked", True)
    pytest.importorskip("bertkit.data.shards")
    shards.mkdir()
    (shards / "manifest.json").write_text("{}")
    verdict, detail = check()
    assert (verdict, str(shards) in detail) == ("fault", True)


def test_a_run_that_went_back_and_was_killed_has_no_fault(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, RunIdentity("pretrain", "x", "kind: pretrain", "0" * 64, 0, ["x"]))
    with run.recording():
        with MetricsLog(run.metrics) as metrics:
            for step in range(1, 11):
                metrics.log(step, {"loss": 1.0 + step})
        run.seal_growing_files()
        run.reset_growing_seal()
        with MetricsLog(run.metrics, start_step=4) as metrics:
            for step in range(5, 9):
                metrics.log(step, {"loss": 2.0})
        run.seal_growing_files()
        shutil.copytree(run.path, tmp_path / "killed")
    verify_run(tmp_path / "killed").raise_for_errors()
