"""ELECTRA in two stages: the model begins with its generator's weights, bit for bit, and the generator is then
frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bertkit.errors import StoppedError, UsageError
from bertkit.files import sha256_of
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.run import run_pretraining
from bertkit.pretraining.stages import stages_of
from bertkit.progress import silent_progress
from bertkit.run.checkpoint import list_checkpoints, load_checkpoint, load_newest_checkpoint
from tests.overrides import parsed
from tests.pretraining.test_electra import first_weights, hashes
from tests.training.tiny_run import write_text

STEPS, BOUNDARY = 6, 2
RECIPE = """
title: two stages for tests
tokenizer: {vocab_size: 300, min_frequency: 1}
data: {layout: {name: doc-sentences}, sequence_length: 24, held_out: 0.05}
model: {family: electra, embedding_size: 14, hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 3,
        intermediate_size: 40, max_position_embeddings: 40}
objective:
  - masked_lm: {weight: 0.0, mask_share: 0.85, random_share: 0.0}
  - replaced_token: {generator_size: 1.0, tie: none, training: two-stage}
optimisation:
  optimizer: {name: adamw, weight_decay: 0.1, bias_correction: false}
  schedule: {name: linear, peak: 2.0e-3, warmup_steps: 0}
  batch_sequences: 5
  steps: 6
  stages:
    - {share: 0.34, set: {objective: [{masked_lm: {mask_share: 0.85, random_share: 0.0}}]}}
    - {share: 0.33}
    - {share: 0.33, set: {data.sequence_length: 32, optimisation.batch_sequences: 3}}
engine: {device: cpu, log_every_steps: 1, save_every_steps: 1, keep_checkpoints: 20, evaluate_every_steps: 100,
         evaluation_sequences: 4, pseudo_perplexity_sequences: 0}
"""


def request(home: Path, run: str, **changes: Any) -> PretrainArguments:
    defaults = {
        "recipe": str(home / "two.yaml"),
        "sources": [str(home / "text.txt")],
        "run_dir": home / run,
        "cache": home / "cache",
        "command": ["test"],
    }
    return PretrainArguments(**{**defaults, **changes})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    (directory / "two.yaml").write_text(RECIPE, encoding="utf-8")
    write_text(directory / "text.txt")
    return directory


@pytest.fixture(scope="module")
def weights(home: Path) -> dict[int, dict[str, Tensor]]:
    """The weights of an uninterrupted run `straight` after each step, by name; 0 are the initial ones."""
    run_pretraining(request(home, "straight"), progress=silent_progress)
    kept = map(load_checkpoint, list_checkpoints(home / "straight" / "checkpoints"))
    found = {int(checkpoint.state["step"]): dict(checkpoint.tensors["weights"]) for checkpoint in kept}
    return {0: first_weights(request(home, "straight")), **found}


def parts(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's encoder and the generator's, by the same names."""
    own, others = "encoder.", "companions.generator.encoder."
    return (
        {name.removeprefix(own): each for name, each in weights.items() if name.startswith(own)},
        {name.removeprefix(others): each for name, each in weights.items() if name.startswith(others)},
    )


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(each, second[name]) for name, each in first.items())


def test_in_the_first_stage_the_generator_alone_moves(weights: dict[int, dict[str, Tensor]]) -> None:
    for step in range(1, BOUNDARY + 1):
        (model, generator), (before, generator_before) = parts(weights[step]), parts(weights[step - 1])
        assert equal(model, before)
        assert not equal(generator, generator_before)
    assert not equal(*parts(weights[BOUNDARY]))


def test_from_the_second_stage_on_the_generator_does_not_move_and_the_model_does(
    weights: dict[int, dict[str, Tensor]],
) -> None:
    """Not by decay either; and the third stage does not start again."""
    resting = {name: each for name, each in weights[BOUNDARY].items() if name.startswith("companions.")}
    for step in range(BOUNDARY + 1, STEPS + 1):
        assert equal(resting, {name: each for name, each in weights[step].items() if name.startswith("companions.")})
        model, generator = parts(weights[step])
        assert not equal(model, generator)
        assert not equal(model, parts(weights[step - 1])[0])


def test_at_the_boundary_the_model_is_its_generator_to_the_bit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bertkit.pretraining.trainer import Pretrainer

    seen: list[tuple[int, bool, bool]] = []
    enter = Pretrainer._enter

    def noting(self: Pretrainer, stage_run: Any) -> None:
        enter(self, stage_run)
        model, generator = parts(dict(self.model.named_parameters()))
        trained = [each.requires_grad for each in self.model.companions["generator"].parameters()]
        seen.append((self.step, equal(model, generator), any(trained)))

    monkeypatch.setattr(Pretrainer, "_enter", noting)
    run_pretraining(request(home, "noted", overrides=parsed(["engine.keep_checkpoints=1"])), progress=silent_progress)
    assert [seen[0], seen[1]] == [(0, False, True), (BOUNDARY, True, False)]
    assert seen[2][1:] == (False, False)


def test_stopping_at_every_step_changes_no_byte(home: Path, weights: dict[int, dict[str, Tensor]]) -> None:
    with pytest.raises(StoppedError):
        run_pretraining(request(home, "stopped", max_minutes=0), progress=silent_progress)
    for step in range(1, STEPS):
        checkpoint = load_newest_checkpoint(home / "stopped" / "checkpoints")
        assert checkpoint is not None
        assert checkpoint.state["step"] == step
        again = request(home, "stopped", recipe=None, sources=[], run_dir=None, resume=str(home / "stopped"))
        again = PretrainArguments(**{**vars(again), "max_minutes": 0})
        if step < STEPS - 1:
            with pytest.raises(StoppedError):
                run_pretraining(again, progress=silent_progress)
        else:
            run_pretraining(again, progress=silent_progress)
    assert hashes(home / "stopped") == hashes(home / "straight")
    assert sha256_of(home / "stopped" / "results.json") == sha256_of(home / "straight" / "results.json")


def test_the_held_out_figures_have_a_baseline_beside_the_accuracy(home: Path, weights: Any) -> None:
    held_out = json.loads((home / "straight" / "results.json").read_text())["held_out"]
    for name in ("accuracy", "baseline", "precision", "recall"):
        assert 0 <= held_out[f"{name}/replaced_token"] <= 1
    assert held_out["baseline/replaced_token"] >= 0.5
    lines = [json.loads(line) for line in (home / "straight" / "metrics.jsonl").read_text().splitlines()]
    assert any("held_out/baseline/replaced_token" in line for line in lines)


FAULTS = [
    (["objective.replaced_token.tie=embeddings"], "tie to none"),
    (["objective.replaced_token.generator_size=0.6666"], "generator_size to 1"),
    (["objective.masked_lm.weight=1.0"], "objective.masked_lm.weight is 1; set it to 0"),
    (["optimisation.stages=[]"], "no generator yet to take weights from"),
    (
        ["optimisation.stages=[{share: 0.5, set: {objective: [causal_lm: {}]}}, {share: 0.5}]"],
        r"optimisation\.stages\.1: .*no generator yet to take weights from; put a stage with",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), FAULTS, ids=[changes[0] for changes, _ in FAULTS])
def test_a_recipe_without_a_valid_second_stage_is_refused(changes: list[str], expected: str, home: Path) -> None:
    with pytest.raises(UsageError, match=expected):
        request(home, "faulty", overrides=parsed(changes)).requested()


def test_the_shipped_recipe_is_the_base_models_but_for_the_stages() -> None:
    recipe, base = load_recipe("electra-two-stage"), load_recipe("electra-base")
    first, second = stages_of(recipe)
    assert (recipe.model, recipe.data, recipe.tokenizer) == (base.model, base.data, base.tokenizer)
    assert recipe.optimisation.optimizer == base.optimisation.optimizer
    assert (first.end_step, second.end_step) == (500_000, 1_000_000)
    assert [[each.term for each in stage.recipe.objectives] for stage in (first, second)] == [
        ["masked_lm"],
        ["masked_lm", "replaced_token"],
    ]
    generator, detector = second.recipe.objectives
    assert (generator.weight, detector.weight) == (0.0, 50.0)
    assert generator.model_dump(exclude={"weight"}) == base.objectives[0].model_dump(exclude={"weight"})
    assert recipe.model.generator(detector.model_dump()["generator_size"]) == recipe.model
    assert [stage.learning_rate(stage.first_step + 10_000) for stage in (first, second)] == [
        first.learning_rate(10_000)
    ] * 2
