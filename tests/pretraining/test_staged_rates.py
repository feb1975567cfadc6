"""Runs whose stages freeze parts or give them other learning rates: the moving weights, and no effect of stopping."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bertkit.errors import UsageError
from bertkit.files import sha256_of
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import silent_progress
from tests.pretraining.stopped_runs import request, stopped_at_every_step
from tests.training.tiny_run import write_text

RECIPE = """
title: a run for tests with rates by stage
tokenizer: {vocab_size: 300, min_frequency: 1}
data: {layout: {name: doc-sentences}, sequence_length: 24, held_out: 0.05}
model: {family: bert, hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 3, intermediate_size: 40,
        max_position_embeddings: 40, hidden_dropout_prob: 0.1}
objective: [masked_lm]
optimisation:
  optimizer: {name: adamw}
  schedule: {name: constant, peak: 2.0e-3}
  batch_sequences: 5
  steps: 6
  stages:
    - share: 0.33
      set: {optimisation.groups: [{parameters: layers.0, rate: 3.0}, {parameters: "*", rate: 0.0}]}
    - share: 0.33
      new_moments: true
      set: {optimisation.groups: [{parameters: layers.1, rate: 3.0}, {parameters: layers.0, rate: 0.3},
                                  {parameters: "*", rate: 0.0}]}
    - {share: 0.34}
engine: {device: cpu, log_every_steps: 1, save_every_steps: 100, evaluate_every_steps: 100, evaluation_sequences: 4,
         pseudo_perplexity_sequences: 0}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rates") / "staged.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    write_text(path.with_name("text.txt"))
    return path


def test_each_stage_moves_what_it_names_and_stopping_at_every_step_changes_no_byte(recipe: Path) -> None:
    straight = run_pretraining(request(recipe, "straight"), progress=silent_progress).run
    weights: list[dict[str, torch.Tensor]] = []
    moments: list[set[str]] = []
    for checkpoint in stopped_at_every_step(recipe, "stopped"):
        weights.append(checkpoint.tensors["weights"])
        moments.append({key.rpartition(":")[0] for key in checkpoint.tensors["optimizer"]})
    assert sha256_of(straight.model / "model.safetensors") == sha256_of(
        recipe.with_name("stopped") / "model/model.safetensors"
    )
    assert len(weights) == 5

    def moved(after: int) -> set[str]:
        first, second = weights[after - 1], weights[after]
        changed = {name for name in second if not torch.equal(first[name], second[name])}
        return {".".join(name.split(".")[:3]) if ".layers." in name else "other" for name in changed}

    assert moved(1) == {"encoder.layers.0"}
    assert moved(2) == moved(3) == {"encoder.layers.0", "encoder.layers.1"}
    assert moved(4) == {"encoder.layers.0", "encoder.layers.1", "other"}
    assert all(name.startswith("encoder.layers.0.") for name in moments[0] | moments[1])
    # The first update after a reset of the moments is Adam's first: each weight moves by its learning rate.
    for layer, rate in ((1, 3.0), (0, 0.3)):
        own = [name for name in weights[1] if name.startswith(f"encoder.layers.{layer}.")]
        largest = max(float((weights[2][name] - weights[1][name]).abs().max()) for name in own)
        assert largest == pytest.approx(2e-3 * rate, rel=0.02)


def test_a_group_of_a_later_stage_that_names_nothing_stops_before_the_first_step(recipe: Path) -> None:
    wrong = recipe.with_name("wrong.yaml")
    text = RECIPE.replace("{parameters: layers.1, rate: 3.0}", "{parameters: layers.2, rate: 3.0}")
    wrong.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"stage 2 of 3: optimisation\.groups\.0\.parameters: .*'layers\.2'"):
        run_pretraining(request(wrong, "wrong"), progress=silent_progress)
    assert not list(recipe.with_name("wrong").glob("checkpoints/*"))
