"""Steps of each run from the study's budget: the cost of a step is measured on the run's own first batches.

FLOPs as in training/cost.py. Tokens and predictions of a step depend on the text and on the objective, not on the
learning rate, so the cost is measured once for each arm's settings, and all its seeds take as many steps. Where a seed
decides how long sequences are (BERT draws a length for a whole document), a run's own FLOPs, which its record has,
differ from the budget by a few percent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bertkit.data.shards import TokenShards
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.stage_run import StageRun
from bertkit.pretraining.stages import stages_of
from bertkit.recipe.hashing import deciding_half
from bertkit.study.settings import Budget
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.cost import training_flops

_SAMPLE = 200
"""Batches of a stage whose cost is measured: with a standard error of some 0.6% on text of uneven length."""
_FREE = ("optimizer", "schedule", "steps", "ema", "max_nonfinite_steps", "roll_back", "spikes")
"""Keys of `optimisation` that do not change what a step costs."""


@dataclass(frozen=True)
class StepCost:
    """Means over the run."""

    flops: float
    tokens: float

    def steps(self, budget: Budget, share: float) -> int:
        """Updates within a share of the budget, at least one."""
        cost = {"flops": self.flops, "tokens": self.tokens, "steps": 1.0}[budget.unit]
        return max(1, round(budget.amount * share / cost))


def cost_key(recipe: Recipe) -> str:
    """A hash of all that decides what a step costs."""
    half = deciding_half(recipe)
    optimisation = {key: value for key, value in half.pop("optimisation").items() if key not in _FREE}
    half.pop("seed")
    return hashlib.sha256(json.dumps([half, optimisation], sort_keys=True).encode()).hexdigest()


def step_cost(recipe: Recipe, shards: TokenShards, *, cache: Path) -> StepCost:
    """The mean cost of a step, over stages in proportion to their shares, with seed 0 whatever the recipe's: seeds that
    are carried out by themselves, as on another machine, take as many steps.

    Up to 200 batches of each stage are measured, evenly spread over its first pass of the text.
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
        steps = stage.end_step - stage.first_step
        of_pass = run.batches.stream.epoch_length(0) // run.batches.batch_sequences
        found = [run.batches[step] for step in spread(min(steps, max(1, of_pass)), _SAMPLE)]
        share = steps / recipe.optimisation.steps / len(found)
        flops += share * sum(training_flops(model, batches, run.objectives) for batches in found)
        tokens += share * sum(batch.num_tokens for batches in found for batch in batches)
    return StepCost(flops, tokens)


def spread(count: int, most: int) -> Sequence[int]:
    """At most this many of the first `count` numbers, evenly spread."""
    return range(count) if count <= most else [index * count // most for index in range(most)]
