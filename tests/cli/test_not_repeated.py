"""Repeating a command finds its finished run, prints the same result and trains nothing; `--fresh` trains again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.distillation.tiny_teacher import RECIPE as STUDENT
from tests.probing.request import write_sentences
from tests.tasks.tiny_task import reviews, write_model, write_table
from tests.training.tiny_run import write_recipe

Bertkit = Callable[..., Any]
FINETUNE = (
    *(
        "finetune",
        "--train",
        "train.csv",
        "--dev",
        "dev.csv",
        "--text",
        "review",
        "--label",
        "stars",
        "--model",
        "base",
    ),
    *("--set", "lr=6e-3", "--set", "engine.device=cpu", "--max-steps", "3"),
)
COMMANDS = {
    "pretrain": ("pretrain", "tiny.yaml", "--data", "text.txt", "--max-steps", "3"),
    "finetune": FINETUNE,
    "suite": (*FINETUNE, "--seeds", "0-1"),
    "distill on text": ("distill", "student.yaml", "--teacher", "base", "--data", "text.txt", "--max-steps", "2"),
    "eval mlm": ("eval", "mlm", "--model", "base", "--data", "text.txt", "--sequences", "6", "--pseudo-sequences", "1"),
    "probe": ("probe", "similarity", "--model", "base", "--data", "sentences.txt", "--sentences", "20"),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    sizes = STUDENT.replace("hidden_size: 24", "hidden_size: 30").replace("[0, 3]", "[0, 1]")
    (tmp_path / "student.yaml").write_text(sizes.replace("intermediate_size: 40", "intermediate_size: 52"))
    write_sentences(tmp_path / "sentences.txt")
    write_model(tmp_path / "base")
    for split, seed in (("train", 1), ("dev", 2)):
        write_table(tmp_path / f"{split}.csv", reviews(24, seed))
    return tmp_path


def runs(home: Path) -> list[str]:
    return sorted(path.parent.name for path in (home / "runs").glob("*/run.json"))


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_same_command_again_gives_the_same_document(command: tuple[str, ...], home: Path, bertkit: Bertkit) -> None:
    first = bertkit(*command, "--json")
    assert first.code == 0, first.stderr
    (run,) = runs(home)
    record = (home / "runs" / run / "run.json").read_bytes()
    again = bertkit(*command, "--json")
    assert (again.code, again.stdout) == (0, first.stdout)
    assert f"finished already: runs/{run} (the same recipe, data and code; --fresh runs it again)" in again.stderr
    assert runs(home) == [run]
    assert (home / "runs" / run / "run.json").read_bytes() == record
    plain = bertkit(*command, "-q")
    assert (plain.code, plain.stdout) == (0, f"runs/{run}\n")
    named = bertkit(*command, "--json", "--run-dir", home / "runs" / run)
    assert named.code == 0
    assert runs(home) == [run]


@pytest.mark.parametrize("name", ["finetune", "suite", "eval mlm"])
def test_fresh_runs_again(name: str, home: Path, bertkit: Bertkit) -> None:
    assert bertkit(*COMMANDS[name]).code == 0
    fresh = bertkit(*COMMANDS[name], "--fresh")
    assert fresh.code == 0
    assert "finished already" not in fresh.stderr
    assert len(runs(home)) == 2
    assert fresh.stdout == f"runs/{runs(home)[1]}\n"
    if name == "suite":
        assert len(list((home / "runs").glob("*/runs/*/run.json"))) == 4
    taken = bertkit(*COMMANDS[name], "--fresh", "--run-dir", home / "runs" / runs(home)[0])
    assert taken.code == 2


def test_what_shows_in_the_result_is_run_again(home: Path, bertkit: Bertkit) -> None:
    """Different data under the same name, a different starting model, and engine settings that are reported."""
    assert bertkit(*FINETUNE).code == 0
    write_table(home / "dev.csv", reviews(24, 3))
    changed = bertkit(*FINETUNE)
    assert "is not used: another data" in changed.stderr
    assert len(runs(home)) == 2
    kept = bertkit(*FINETUNE, "--set", "engine.keep_checkpoints=1")
    assert "is not used: another engine.keep_checkpoints" in kept.stderr
    assert len(runs(home)) == 3
    faster = bertkit(*FINETUNE, "--set", "engine.micro_batch_tokens=64")
    assert "finished already" in faster.stderr
    assert len(runs(home)) == 3


def test_fresh_and_resume_exclude_each_other(home: Path, bertkit: Bertkit) -> None:
    refused = bertkit(*FINETUNE, "--fresh", "--resume")
    assert refused.code == 2
    assert "--fresh and --resume exclude each other" in refused.stderr
