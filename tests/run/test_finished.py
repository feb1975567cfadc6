"""A finished run replaces a new one only if data, model and code are the recorded ones and its files are complete."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from making import finished_run, identity, stopped_run

from bertkit.code_hash import code_sha256
from bertkit.errors import UsageError
from bertkit.files import read_json, write_json
from bertkit.run.directory import RECORD, RunDirectory, RunIdentity
from bertkit.run.finished import finished_before


def changed_record(**fields: object) -> Callable[[RunDirectory], None]:
    return lambda run: write_json(run.path / RECORD, read_json(run.path / RECORD) | fields)


def without_code(run: RunDirectory) -> None:
    record = read_json(run.path / RECORD)
    del record["code_sha256"]
    write_json(run.path / RECORD, record)


def test_the_newest_finished_run_of_the_same_recipe_data_and_code_is_found(tmp_path: Path) -> None:
    assert finished_before(tmp_path, identity()) is None
    stopped_run(tmp_path)
    assert finished_before(tmp_path, identity()) is None
    made = [finished_run(tmp_path) for _ in range(2)]
    found = finished_before(tmp_path, identity())
    assert found is not None
    assert found.path == max(made, key=lambda run: run.record["started"]).path


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (changed_record(code_sha256="0" * 64), "it was made by another version of bertkit"),
        (without_code, "it was made by another version of bertkit"),
        (lambda run: (run.model / "model.safetensors").write_bytes(b"other"), "model.safetensors: its sha256 is not"),
        (lambda run: (run.model / "config.json").unlink(), "config.json: missing"),
        (lambda run: (run.path / "results.json").write_text("{}"), "results.json: its sha256 is not"),
        (lambda run: (run.path / "recipe.yaml").unlink(), "recipe.yaml: missing"),
    ],
)
def test_a_damaged_run_or_one_of_other_code_is_passed_over_with_the_reason(
    damage: Callable[[RunDirectory], object], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = finished_run(tmp_path)
    damage(run)
    with caplog.at_level(logging.INFO):
        assert finished_before(tmp_path, identity()) is None
    assert f"{run.path} is finished and of the same recipe, but is not used: " in caplog.text
    assert reason in caplog.text
    with pytest.raises(UsageError, match=r"cannot be reused: .*name another --run-dir"):
        finished_before(tmp_path, identity(), run_dir=run.path)


@pytest.mark.parametrize("name", ["data", "tokenizer", "model"])
def test_other_data_or_another_model_is_another_run(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finished_run(tmp_path)
    other = replace(identity(), fingerprints={**identity().fingerprints, name: "x" * 64})
    with caplog.at_level(logging.INFO):
        assert finished_before(tmp_path, other) is None
    assert f"not used: another {name}" in caplog.text


@pytest.mark.parametrize("other", [identity(what_hash="f" * 64), replace(identity(), kind="finetune")])
def test_another_recipe_or_command_is_not_even_considered(
    other: RunIdentity, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finished_run(tmp_path)
    with caplog.at_level(logging.INFO):
        assert finished_before(tmp_path, other) is None
    assert "not used" not in caplog.text


def test_a_run_directory_that_is_named_is_the_only_one_that_serves(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    assert finished_before(tmp_path, identity(), run_dir=tmp_path / "new") is None
    found = finished_before(tmp_path, identity(), run_dir=run.path)
    assert found is not None
    assert found.path == run.path


def test_a_suite_whose_runs_are_damaged_is_passed_over(tmp_path: Path) -> None:
    own, suite = finished_run(tmp_path, "own"), finished_run(tmp_path)
    with suite.recording():
        suite.write_results({"runs": [{"run": str(own.path)}]})
    assert finished_before(tmp_path, identity()) is not None
    (own.model / "config.json").write_text("{ }")
    assert finished_before(tmp_path, identity()) is None


def test_a_run_that_two_versions_of_the_code_have_worked_on_has_none(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    assert read_json(run.path / RECORD)["code_sha256"] == code_sha256()
    changed_record(code_sha256="0" * 64)(run)
    with run.recording():
        pass
    assert read_json(run.path / RECORD)["code_sha256"] is None
