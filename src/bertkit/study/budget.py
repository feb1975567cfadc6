"""Converts the study's budget to steps per run; the cost of a step is measured on the run's own first batches.

FLOPs as in training/cost.py. Tokens and predictions per step depend on the text and the objective, not on the learning
rate, so the cost is measured once for each arm's settings, and all its seeds take the same number of steps. If the seed
affects sequence lengths (BERT draws one length per document), a run's actual FLOPs, as recorded, differ from the budget
by a few percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bertkit.data.shards import TokenShards
from bertkit.files import json_sha256
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.stage_run import StageRun
from bertkit.pretraining.stages import stages_of
from bertkit.recipe.hashing import hashed_settings
from bertkit.study.settings import Budget
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.cost import training_flops

_SAMPLE = 200
"""Number of batches measured per stage; the standard error is about 0.6% on text of uneven length."""
_FREE = ("optimizer", "schedule", "steps", "ema", "max_nonfinite_steps", "roll_back", "spikes")
"""Keys of `optimisation` that do not affect the cost of a step."""


@dataclass(frozen=True)
class StepCost:
    """Mean cost of a step over the run."""

    flops: float
    tokens: float

    def steps(self, budget: Budget, share: float) -> int:
        """Number of updates within a share of the budget, at least one."""
        cost = {"flops": self.flops, "tokens": self.tokens, "steps": 1.0}[budget.unit]
        return max(1, round(budget.amount * share / cost))


def cost_key(recipe: Recipe) -> str:
    """A hash of everything that affects the cost of a step."""
    half = hashed_settings(recipe)
    optimisation = {key: value for key, value in half.pop("optimisation").items() if key not in _FREE}
    half.pop("seed")
    return json_sha256([half, optimisation])


def step_cost(recipe: Recipe, shards: TokenShards, *, cache: Path) -> StepCost:
    """The mean cost of a step, with stages weighted by their shares. Always measured with seed 0, so that seeds run
    separately, for example on another machine, take the same number of steps.

    Up to 200 batches of each stage are measured: texts evenly spread over its first pass, with the batch sizes and
    masking rates of steps evenly spread over all of the stage.
    """
    recipe = recipe.model_copy(update={"seed": 0})
    tokenizer, stages = load_tokenizer(shards.directory), stages_of(recipe)
    objectives = [objective for stage in stages for objective in stage.recipe.objectives]
    flops = tokens = 0.0
    for stage in stages:
        run = StageRun(stage, shards, tokenizer, cache=cache)
        run.batches.check_enough()
        with torch.device("meta"):
            model = pretraining_model(stage.recipe.model, objectives, tokenizer.vocab_size, pad_id=tokenizer.pad_id)
        steps, sequences = stage.end_step - stage.first_step, run.batches.batch_sequences
        read = min(steps, max(1, run.batches.stream.epoch_length(0) // sequences))
        # Batch sizes and masking rates may change until the last step, whose text is only known in the first pass.
        found = [run.batches.of(n * steps // read, n * sequences) for n in spread(read, _SAMPLE)]
        share = steps / recipe.optimisation.steps / len(found)
        flops += share * sum(training_flops(model, batches, run.objectives) for batches in found)
        tokens += share * sum(batch.num_tokens for batches in found for batch in batches)
    return StepCost(flops, tokens)


def spread(count: int, most: int) -> Sequence[int]:
    """At most this many of the first `count` numbers, evenly spread."""
    return range(count) if count <= most else [index * count // most for index in range(most)]
