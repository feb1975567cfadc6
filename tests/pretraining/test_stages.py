"""Stages: permitted changes, first and last steps, and the schedule in effect."""

from __future__ import annotations

from typing import Any

import pytest

from bertkit.errors import UsageError
from bertkit.pretraining.arguments import completed
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.stages import stages_of
from tests.overrides import parsed

STEPS = 1000


def stages(*configs: dict[str, Any]) -> Any:
    import json

    overrides = [
        "optimisation.schedule={name: linear, peak: 1.0e-3, warmup_steps: 10}",
        f"optimisation.steps={STEPS}",
        f"optimisation.stages={json.dumps(configs)}",
    ]
    return stages_of(load_recipe("bert-mini", parsed(overrides)))


def test_depth_batch_data_and_objective_change_where_the_share_ends() -> None:
    first, second = stages(
        {
            "share": 0.3,
            "set": {
                "model.num_hidden_layers": 2,
                "optimisation.batch_sequences": 16,
                "data.sequence_length": 64,
                "objective": [{"masked_lm": {"rate": 0.3}}],
            },
        },
        {"share": 0.7},
    )
    assert (first.first_step, first.end_step, second.first_step, second.end_step) == (0, 300, 300, 1000)
    assert first.recipe.model.num_hidden_layers == 2
    assert second.recipe.model.num_hidden_layers == 4
    assert [stage.recipe.optimisation.batch_sequences for stage in (first, second)] == [16, 256]
    assert [stage.recipe.data.sequence_length for stage in (first, second)] == [64, 512]
    assert [len(stage.recipe.objectives) for stage in (first, second)] == [1, 2]


def test_a_schedule_of_its_own_counts_the_stages_steps_and_the_runs_counts_all() -> None:
    first, second = stages(
        {"share": 0.4, "set": {"optimisation.schedule.peak": 0.5, "optimisation.schedule.warmup_steps": 3}},
        {"share": 0.6, "set": {"data.sequence_length": 64}},
    )
    own = first.recipe.optimisation.schedule
    assert [first.learning_rate(step) for step in (0, 3, 399)] == [own.learning_rate(step, 400) for step in (0, 3, 399)]
    assert first.learning_rate(3) == 0.5
    whole = second.recipe.optimisation.schedule
    assert [second.learning_rate(step) for step in (400, 999)] == [
        whole.learning_rate(step, STEPS) for step in (400, 999)
    ]


@pytest.mark.parametrize(
    "key", ["model.hidden_size", "optimisation.steps", "optimisation.optimizer.eps", "seed", "tokenizer.vocab_size"]
)
def test_what_cannot_change_inside_a_run_is_named(key: str) -> None:
    with pytest.raises(UsageError, match=rf"stages\.0\.set: {key} cannot change"):
        stages({"share": 1.0, "set": {key: 8}})


@pytest.mark.parametrize("key", ["max_epochs", "max_words"])
def test_a_limit_of_the_whole_run_is_refused_in_a_stage(key: str) -> None:
    recipe = load_recipe("bert-mini", parsed([f"optimisation.stages.1.set.data.{key}=9"]))
    with pytest.raises(UsageError, match=rf"stages\.1\.set: data\.{key} limits the whole run"):
        completed(recipe, None)
    assert completed(load_recipe("bert-mini", parsed([f"data.{key}=9"])), None)


def test_a_stage_is_checked_like_a_recipe_of_its_own() -> None:
    with pytest.raises(UsageError, match="sequence_length"):
        stages({"share": 0.5, "set": {"data.sequence_length": 4096}}, {"share": 0.5})


def test_shares_that_do_not_make_a_whole_are_refused() -> None:
    with pytest.raises(UsageError, match="sum to"):
        stages({"share": 0.5}, {"share": 0.4})


def test_a_first_stage_has_no_moments_to_begin_anew() -> None:
    with pytest.raises(UsageError, match=r"stages\.0\.new_moments: every run starts with new moments"):
        stages({"share": 0.5, "new_moments": True}, {"share": 0.5})


def test_a_key_of_a_stage_is_changed_from_the_command_line_and_the_others_stay() -> None:
    changes = parsed(
        ["optimisation.stages.0.set.data.sequence_length=64", "optimisation.stages.1.set.objective.masked_lm.rate=0.4"]
    )
    first, second = stages_of(load_recipe("bert-mini", changes))
    plain = stages_of(load_recipe("bert-mini"))[0]
    assert first.recipe.data == plain.recipe.data.model_copy(update={"sequence_length": 64})
    assert second.recipe.objectives[0].model_dump()["rate"] == 0.4


def test_a_whole_section_of_data_in_a_stage_is_refused() -> None:
    with pytest.raises(UsageError, match=r"stages\.0\.set: write the keys of data with dots: data\.sequence_length"):
        stages({"share": 1.0, "set": {"data": {"sequence_length": 64}}})


@pytest.mark.parametrize(
    "change",
    [
        {"data.sequence_length": "128"},
        {"optimisation.schedule.warmup_steps": "5"},
    ],
)
def test_numbers_that_are_texts_are_no_bug(change: dict[str, Any], bertkit: Any, tmp_path: Any) -> None:
    import json

    configs = json.dumps([{"share": 0.5, "set": change}, {"share": 0.5}])
    words = ["--set", f"optimisation.stages={configs}", "--max-length", "64", "--max-steps", "10", "--plan"]
    (tmp_path / "text.txt").write_text("a text")
    done = bertkit("pretrain", "bert-mini", "--data", tmp_path / "text.txt", *words)
    assert done.code in (0, 2), done.stderr
    assert "a bug in bertkit" not in done.stderr
