"""`--resume RUN` without a recipe refuses what would change the run; it ignores nothing that is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tasks.tiny_task import reviews, write_model, write_table
from tests.training.tiny_run import write_recipe

Bertkit = Callable[..., Any]


def test_model_data_and_seeds_of_a_fine_tuning_run_are_its_own(
    bertkit: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    write_model(tmp_path / "other", max_tokens=41)
    write_table(tmp_path / "train.csv", reviews(20, 1))
    write_table(tmp_path / "dev.csv", reviews(9, 2))
    own = ("--train", "train.csv", "--dev", "dev.csv", "--text", "review", "--label", "stars", "--model", "model")
    done = bertkit("finetune", *own, "--max-steps", "1", "--device", "cpu", "--run-dir", "run")
    assert done.code == 0, done.stderr
    for words, told in (
        (("--model", "other"), f"model: the run has '{tmp_path / 'model'}', now '{tmp_path / 'other'}'"),
        (("--data-dir", "."), "data.directory: the run has null, now"),
        (("--seeds", "0-1"), "is a single run with seed 0; resume it without --seeds"),
        (("--grid", "lr=1e-5,2e-5"), "is a single run with seed 0"),
    ):
        refused = bertkit("finetune", "--resume", "run", *words)
        assert (refused.code, told in refused.stderr) == (2, True), refused.stderr
    again = bertkit("finetune", "--resume", "run", "--model", "model", "--seeds", "0")
    assert (again.code, again.stdout) == (0, done.stdout), again.stderr


def test_text_and_model_of_a_pretraining_run_are_its_own(bertkit: Bertkit, tmp_path: Path) -> None:
    recipe, text = write_recipe(tmp_path)
    other = write_model(tmp_path / "model")
    run = tmp_path / "run"
    assert bertkit("pretrain", recipe, "--data", text, "--run-dir", run, "--max-minutes", "0").code == 75
    (tmp_path / "other.txt").write_text("Other words.")
    for words, told in (
        (("--data", tmp_path / "other.txt"), "data.sources"),
        (("--init", other), "init: the run has null, now"),
    ):
        refused = bertkit("pretrain", "--resume", run, *words)
        assert (refused.code, told in refused.stderr) == (2, True), refused.stderr
    again = bertkit("pretrain", "--resume", run, "--data", text, "--max-minutes", "0")
    assert again.code == 75, again.stderr
