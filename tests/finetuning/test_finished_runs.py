"""A suite's runs: which finished ones are used instead of training again, and the link to the chosen model."""

from __future__ import annotations

from pathlib import Path

from bertkit.finetuning.recipe import load_finetune_recipe
from bertkit.finetuning.run import finished_run, link_model


def test_a_damaged_run_next_to_a_suite_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{")
    recipe = load_finetune_recipe("conll2003-features")
    assert finished_run(tmp_path, tmp_path / "suite", recipe, lambda: ()) is None


def test_the_model_of_a_moved_suite_is_its_own(tmp_path: Path) -> None:
    for suite in ("first", "second"):
        (tmp_path / "suite" / "runs" / "seed=0" / "model").mkdir(parents=True)
        (tmp_path / "suite" / "runs" / "seed=0" / "model" / "config.json").write_text(suite)
        link_model(tmp_path / "suite" / "model", tmp_path / "suite" / "runs" / "seed=0" / "model")
        (tmp_path / "suite").rename(tmp_path / suite)
    for suite in ("first", "second"):
        assert (tmp_path / suite / "model" / "config.json").read_text() == suite


def test_a_chosen_model_outside_the_suite_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    (tmp_path / "run" / "model").mkdir(parents=True)
    for _ in range(2):
        link_model(tmp_path / "suite" / "model", tmp_path / "run" / "model")
    assert (tmp_path / "suite" / "model").readlink() == (tmp_path / "run" / "model").resolve()
