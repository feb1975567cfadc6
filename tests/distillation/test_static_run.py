"""`bertkit distill static-embeddings` writes an ordinary run, whose model works in every command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.recipe.find import shipped_directory
from tests.tasks.tiny_task import write_model

Command = Callable[..., Any]
NAME = "static-embeddings"


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_model(tmp_path / "teacher", heads=("masked_lm",))


def test_the_recipe_opens_with_its_source_and_command() -> None:
    text = (shipped_directory() / f"{NAME}.yaml").read_text()
    comment = text[: text.index("\nkind:")]
    assert "Model2Vec" in comment
    assert f"bertkit distill {NAME}" in comment


def test_a_run_is_made_once_and_its_model_is_read(teacher: Path, bertkit: Command) -> None:
    words = ("distill", NAME, "--teacher", teacher, "--set", "static.width=7")
    done = bertkit(*words, "--json")
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["status"], document["steps"], document["tokens"]) == ("done", 0, 0)
    assert document["results"]["static"]["width"] == 7
    run = Path(document["run"])
    assert {"recipe.yaml", "run.json", "environment.json", "results.json", "model"} <= {p.name for p in run.iterdir()}
    assert json.loads(bertkit(*words, "--json").stdout)["run"] == str(run)
    assert bertkit("runs", "verify", run).code == 0
    Path("texts.txt").write_text("fine cat list\npoor tensor\n")
    rows = [json.loads(line) for line in bertkit("embed", "--model", run, "texts.txt").stdout.splitlines()]
    assert [len(row["embedding"]) for row in rows] == [7, 7]
    again = bertkit("distill", run / "recipe.yaml", "--fresh", "--run-dir", "again", "--json")
    assert json.loads(again.stdout)["results"] == document["results"]
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (Path("again") / weights).read_bytes()
    assert json.loads(bertkit("distill", "--resume", run, "--json").stdout)["run"] == str(run)


def test_the_plan_counts_the_rows_of_the_table(teacher: Path, bertkit: Command) -> None:
    done = bertkit("distill", NAME, "--teacher", teacher, "--set", "static.width=5", "--plan", "--json")
    plan = json.loads(done.stdout)
    made = json.loads(bertkit("distill", NAME, "--teacher", teacher, "--set", "static.width=5", "--json").stdout)[
        "results"
    ]["static"]
    assert plan["parameters"]["total"] == made["tokens"] * 5
    assert plan["tokens"] == made["tokens"] * 3
    assert plan["steps"] == 0
    assert plan["flops"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--teacher", "teacher", "--teacher", "teacher"),
            "--teacher: a table of token vectors is made from a single model",
        ),
        (("--teacher", "teacher", "--task", "mrpc"), "--task: the recipe makes a table of token vectors"),
        (("--teacher", "teacher", "--max-steps", "3"), "--max-steps: the recipe makes a table of token vectors"),
        (("--teacher", "teacher", "--student", "teacher"), "--student: the recipe makes a table of token vectors"),
        (("--teacher", "teacher", "--set", "static.width=0"), "static.width"),
        (("--teacher", "teacher", "--set", "static.words=3"), "words and text go together"),
        (("--set", "teacher=null"), "teacher: missing; name the encoder"),
    ],
)
def test_what_does_not_fit_is_refused(teacher: Path, words: tuple[str, ...], message: str, bertkit: Command) -> None:
    done = bertkit("distill", NAME, *words)
    assert done.code == 2
    assert message in done.stderr


def test_missing_models_and_texts_are_named(teacher: Path, bertkit: Command) -> None:
    assert bertkit("distill", NAME, "--teacher", "./nowhere").code == 3
    done = bertkit("distill", NAME, "--teacher", teacher, "--set", "static.words=3", "--set", "static.text=no.txt")
    assert done.code == 3
    assert "no.txt: there is no such file" in done.stderr
    done = bertkit("show-batch", NAME)
    assert done.code == 2
    assert "trains nothing" in done.stderr
    ignored = bertkit("distill", NAME, "--teacher", "t", "--jobs", "2", "--seed", "0")
    assert (ignored.code, "--jobs, --seed: the recipe makes a table" in ignored.stderr) == (2, True), ignored.stderr
