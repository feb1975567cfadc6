"""`bertkit distill`: one command for two kinds of recipes, and its messages if options do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tasks.tiny_task import reviews, write_model, write_table

from bertkit.models.labels import Labels

Bertkit = Callable[..., Any]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "teacher", heads=("sequence_classification",), labels=Labels(("bad", "good")))
    write_table(tmp_path / "train.csv", reviews(23, 1))
    write_table(tmp_path / "dev.csv", reviews(11, 2))
    return tmp_path


OWN = ("--train", "train.csv", "--dev", "dev.csv", "--text", "review", "--label", "stars")
SMALL = ("--set", "student={layers: first, number: 1}", "--set", "batch=5", "--device", "cpu", "--precision", "fp32")


def test_a_user_s_own_table_comes_out_as_a_document(bertkit: Bertkit, place: Path) -> None:
    done = bertkit("distill", "distil-task", "--teacher", "teacher", *OWN, *SMALL, "--max-steps", "3", "--json")
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["status"] == "done"
    assert document["steps"] == 3
    assert document["results"]["control"] is False
    assert document["results"]["teacher"]["models"] == [str(place / "teacher")]
    assert "retained by the student" in done.stderr
    assert json.loads((Path(document["run"]) / "run.json").read_text())["kind"] == "distill"
    again = bertkit("distill", "--resume", document["run"], "--json")
    assert json.loads(again.stdout)["results"] == document["results"]
    data = bertkit("distill", "--resume", document["run"], *OWN)
    assert (data.code, "--train, --dev, --text, --label: the resumed run has its own" in data.stderr) == (2, True)
    other = bertkit("distill", "--resume", document["run"], "--teacher", "other", "--control")
    assert other.code == 2
    assert "--teacher, --control: the resumed run has its own" in " ".join(other.stderr.split())


def test_a_control_is_told_as_one(bertkit: Bertkit, place: Path) -> None:
    done = bertkit(
        "distill",
        "pkd",
        "--teacher",
        "teacher",
        *OWN,
        *SMALL,
        "--set",
        "max_length=40",
        "--max-steps",
        "2",
        "--control",
    )
    assert done.code == 0, done.stderr
    assert "control run, without the teacher" in done.stderr
    results = json.loads((Path(done.stdout.strip().splitlines()[-1]) / "results.json").read_text())
    assert results["control"] is True


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "give a RECIPE, such as distil-task"),
        (
            ("bert-tiny", "--teacher", "teacher"),
            "bert-tiny is a recipe of kind pretrain, not distill: run it with `bertkit pretrain bert-tiny`",
        ),
        (("distil-task", *OWN), "give --teacher MODEL"),
        (("distil-task", "--teacher", "teacher"), "task: which one"),
        (("pd", "--teacher", "teacher", *OWN), "give --student MODEL"),
        (("distil-task", "--teacher", "teacher", "--data", "x.txt"), "--data: the recipe distils on a task"),
        (("distilbert", "--teacher", "teacher", "--seeds", "0-2"), "--seeds: the recipe distils on text"),
        (
            ("distilbert", "--teacher", "teacher", "--dev", "d", "--text-pair", "b"),
            "--dev, --text-pair: the recipe distils",
        ),
        (("--resume",), "no unfinished run to resume"),
    ],
)
def test_what_does_not_fit_is_told(bertkit: Bertkit, place: Path, words: tuple[str, ...], told: str) -> None:
    done = bertkit("distill", *words)
    assert done.code == 2
    assert told.casefold() in " ".join(done.stderr.split()).casefold()
