"""Recipes with former keys of fine-tuning equal those with today's keys, and one line names the former ones."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.overrides import parsed

from bertkit.finetuning.recipe import changed, load_finetune_recipe, resolved
from bertkit.recipe import old_keys
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.resolve import resolve_recipe
from bertkit.training.config import OptimisationConfig

OLD = """kind: finetune
task: rte
model: m
optimisation: {learning_rate: 0.002, warmup_share: 0.2, schedule: cosine, weight_decay: 0.3, max_steps: 7, epochs: 2}
"""
NEW = """kind: finetune
task: rte
model: m
optimisation:
  schedule: {name: cosine, peak: 0.002, warmup_share: 0.2}
  optimizer: {weight_decay: 0.3}
  steps: 7
  epochs: 2
"""


def optimisation_of(directory: Path, text: str, *overrides: str, name: str = "x") -> OptimisationConfig:
    file = directory / f"{name}.yaml"
    file.write_text(text, encoding="utf-8")
    return changed(load_finetune_recipe(str(file)), parsed(overrides)).optimisation


def test_old_keys_are_the_new_ones_and_one_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old_keys._log_renamed.cache_clear()
    with caplog.at_level(logging.INFO):
        assert optimisation_of(tmp_path, OLD) == optimisation_of(tmp_path, NEW)
        optimisation_of(tmp_path, OLD)
    (line,) = [each.getMessage() for each in caplog.records]
    assert "optimisation.learning_rate is now optimisation.schedule.peak" in line
    assert "optimisation.max_steps is now optimisation.steps" in line


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("optimisation.learning_rate=0.5", {"peak": 0.5, "warmup_share": 0.2, "floor": 0.0, "name": "cosine"}),
        ("lr=0.5", {"peak": 0.5, "warmup_share": 0.2, "floor": 0.0, "name": "cosine"}),
        ("optimisation.warmup_share=0", {"peak": 0.002, "warmup_share": 0.0, "floor": 0.0, "name": "cosine"}),
        ("optimisation.schedule=constant", {"peak": 0.002, "warmup_share": 0.2, "name": "constant"}),
    ],
)
def test_overrides_take_either_key_and_leave_the_rest(tmp_path: Path, override: str, wanted: dict[str, Any]) -> None:
    assert optimisation_of(tmp_path, OLD, override).schedule.model_dump() == wanted
    recipe = changed(load_finetune_recipe(str(tmp_path / "x.yaml")), parsed([override]))
    assert recipe.optimisation.schedule.model_dump() == wanted


def test_a_schedule_of_a_bare_name_keeps_peak_and_warm_up_of_the_recipe_that_it_extends(tmp_path: Path) -> None:
    optimisation_of(tmp_path, NEW, name="base")
    extended = optimisation_of(tmp_path, "extends: base.yaml\nkind: finetune\noptimisation: {schedule: constant}\n")
    assert extended.schedule.model_dump() == {"peak": 0.002, "warmup_share": 0.2, "name": "constant"}
    newer = "extends: x.yaml\nkind: finetune\noptimisation: {schedule: {peak: 0.7}}\n"
    assert optimisation_of(tmp_path, newer, name="newer").schedule.peak == 0.7


def test_a_complete_recipe_of_an_old_run_is_todays(tmp_path: Path) -> None:
    old = "learning_rate: 0.001, warmup_share: 0.1, schedule: linear, weight_decay: 0.01, max_steps: null, epochs: 3.0"
    text = f"name: x\nkind: finetune\ntask: rte\nmodel: m\noptimisation: {{{old}, optimizer: {{name: adamw}}}}\n"
    written = tmp_path / "run.yaml"
    written.write_text(text, encoding="utf-8")
    recipe = resolved(load_finetune_recipe(str(written)))
    again = tmp_path / "again.yaml"
    again.write_text(dump_recipe(recipe), encoding="utf-8")
    assert resolved(load_finetune_recipe(str(again))) == recipe
    assert recipe.optimisation.optimizer is not None
    assert (recipe.optimisation.optimizer.weight_decay, recipe.optimisation.steps) == (0.01, None)
    optimisation = resolve_recipe(str(written)).plain()["optimisation"]
    assert optimisation["schedule"] == {"name": "linear", "peak": 0.001, "warmup_share": 0.1}
