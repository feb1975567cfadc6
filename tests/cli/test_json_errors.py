"""Every failure under `--json` is one JSON document on stdout, `{"error", "code"}`, with the same exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.training.tiny_run import write_recipe

from bertkit.cli import app as app_module
from bertkit.cli.app import asks_for_json

Bertkit = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["pretrain", "bertt", "--json"], 2, "bertt"),
        (["pretrain", "--json", "bert-tiny", "--data", "nowhere.txt"], 3, "nowhere.txt"),
        (["finetune", "--json", "--train", "t.csv"], 2, "--dev"),
        (["tune", "--json", "--train", "t.csv"], 2, "--dev"),
        (["distill", "--json"], 2, "RECIPE"),
        (["eval", "blimp", "--json", "--model", "./nowhere"], 3, ""),
        (["eval", "score", "rte", "--json"], 2, "--predictions"),
        (["probe", "similarity", "--model", "./nowhere", "--data", "t", "--json"], 3, "nowhere"),
        (["predict", "--model", "./nowhere", "--json"], 3, "does not exist"),
        (["fill", "a [MASK]", "--model", "./nowhere", "--json"], 3, "does not exist"),
        (["runs", "show", "nothing", "--json"], 3, "nothing"),
        (["runs", "replay", "nothing", "--json"], 3, "nothing"),
        (["report", "nothing", "--json"], 3, "nothing"),
        (["push", "nothing", "me/it", "--dry-run", "--json"], 3, "nothing"),
        (["init", "mine.yaml", "--from", "nothing", "--json"], 2, "nothing"),
        (["recipes", "show", "nothing", "--json"], 2, "nothing"),
        (["tokenize", "nowhere.txt", "--out", "x", "--json"], 3, "nowhere.txt"),
        (["export", "./nowhere", "--to", "x", "--json"], 3, "does not exist"),
        (["show-batch", "bertt", "--json"], 2, "bertt"),
        (["study", "objectivess", "--json"], 2, "objectivess"),
        (["embed", "nowhere.txt", "--model", "./nowhere", "--json"], 3, "nowhere.txt"),
        (["search", "q", "--model", "./nowhere", "--corpus", "nowhere.txt", "--json"], 3, "nowhere.txt"),
        (["generate", "a", "--model", "./nowhere", "--json"], 3, "does not exist"),
        (["mine-negatives", "--model", "./nowhere", "--json"], 2, "--pairs"),
        (["bench", "startup", "--rounds", "0", "--json"], 2, "--rounds"),
        (["serve", "./nowhere", "--json"], 3, "does not exist"),
        (["replay-batch", "nothing", "--json"], 3, "nothing"),
        (["pretrain", "--no-such-option", "--json"], 2, "--no-such-option"),
        (["no-such-command", "--json"], 2, "no-such-command"),
    ],
)
def test_a_failure_of_every_command_is_one_document(
    arguments: list[str], code: int, error: str, bertkit: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = bertkit(*arguments)
    assert outcome.code == code, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document.keys() == {"error", "code"}
    assert document["code"] == code
    assert error in document["error"]
    assert f"error: {document['error']}" in outcome.stderr
    plain = bertkit(*(word for word in arguments if word != "--json"))
    assert (plain.code, plain.stdout) == (code, "")


def test_every_command_is_tried() -> None:
    (mark,) = test_a_failure_of_every_command_is_one_document.pytestmark  # type: ignore[attr-defined]  # pytest's own
    assert {arguments[0] for arguments, *_ in mark.args[1]} >= set(app_module.COMMANDS) - {"cache", "doctor"}


def test_a_stop_is_told_without_a_number_that_the_user_did_not_give(bertkit: Bertkit, tmp_path: Path) -> None:
    recipe, text = write_recipe(tmp_path)
    stopped = bertkit("pretrain", recipe, "--data", text, "--run-dir", tmp_path / "run", "--max-minutes", "0", "--json")
    assert stopped.code == 75
    document = json.loads(stopped.stdout)
    assert document["code"] == 75
    assert document["error"].startswith(
        "stopped by the time limit at step 1 of 60, checkpoint saved; continue with `bertkit"
    )
    assert "error:" not in stopped.stderr


def test_a_bug_is_one_document_too(bertkit: Bertkit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr("bertkit.run.find.find_runs", broken)
    outcome = bertkit("runs", "list", "--json")
    assert outcome.code == 1
    assert json.loads(outcome.stdout) == {"error": "a bug in bertkit: RuntimeError: oh", "code": 1}


def test_a_result_that_is_a_failure_stays_the_only_document(bertkit: Bertkit, tmp_path: Path) -> None:
    (tmp_path / "no.zip").write_bytes(b"no archive")
    outcome = bertkit("eval", "check", tmp_path / "no.zip", "--json")
    assert outcome.code == 5
    assert json.loads(outcome.stdout)["ok"] is False


def test_json_behind_a_double_dash_is_a_text() -> None:
    assert asks_for_json(["fill", "--json", "a"])
    assert not asks_for_json(["fill", "--", "--json"])


def test_the_help_of_predict_calls_its_output_json_lines(bertkit: Bertkit) -> None:
    shown = " ".join(bertkit("predict", "--help").stdout.replace("│", " ").split())
    assert "JSON Lines, one object per example" in shown
    assert "Print one JSON document on stdout" not in shown
