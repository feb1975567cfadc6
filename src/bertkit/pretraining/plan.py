"""The cost of a pretraining run, stage by stage: the parts of `--plan` (training/plan.py).

Nothing here follows a paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bertkit.models.heads import HEAD_KINDS
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.stages import Stage, stages_of
from bertkit.training.cost import CHECKPOINT_BYTES, count_parameters, head_rows, step_flops, training_memory_bytes
from bertkit.training.engine import resolve_engine
from bertkit.training.plan import PlannedTeacher, plan_document, planned_rate


def pretraining_plan(
    recipe: Recipe, *, vocab_size: int | None = None, teacher: PlannedTeacher | None = None
) -> dict[str, Any]:
    """Parameters, steps, tokens, FLOPs, memory, disk and time; sequences are taken at their full length.

    A run that ends with its time has as many steps as this machine makes in it.

    Args:
        recipe: resolved.
        vocab_size: V where it is known; else the recipe's, of which a corpus too small for it gives less, and a smaller
            model.
        teacher: beside the model, if there is one.
    """
    engine = resolve_engine(recipe.engine)
    stages = stages_of(recipe)
    objectives = [objective for stage in stages for objective in stage.recipe.objectives]
    with torch.device("meta"):
        model = pretraining_model(recipe.model, objectives, vocab_size or recipe.tokenizer.vocab_size)
    parameters = count_parameters(model)
    memory = 0.0
    stretches: list[_Stretch] = []
    for stage in stages:
        length = stage.recipe.data.sequence_length
        for first, end, sequences in stage.batch_sizes.pieces(stage.first_step, stage.end_step):
            predictions = head_rows(stage.recipe.objectives, partial(_mean_count, stage=stage, first=first, end=end))
            in_all = sum(count for head, count in predictions.items() if HEAD_KINDS[head] == "vocabulary")
            step = step_flops(
                model,
                tokens=sequences * length,
                squared_lengths=sequences * length**2,
                predictions={head: sequences * count for head, count in predictions.items()},
                sequences=sequences,
            )
            stretches.append(_Stretch(end - first, sequences * length, step))
            micro_batch = min(engine.micro_batch_tokens, sequences * length)
            memory = max(
                memory,
                training_memory_bytes(model, micro_batch_tokens=micro_batch, predictions=in_all * micro_batch / length),
            )
    whole = stretches
    if (hours := recipe.optimisation.schedule.hours) is not None:
        beside = 0.0 if teacher is None else teacher.flops / _flops(whole)
        stretches = _within(whole, hours * 3600 * planned_rate(engine) / (1 + beside))
        teacher = None if teacher is None else replace(teacher, flops=beside * _flops(stretches))
    kept = engine.intervals.keep_checkpoints + 1
    return plan_document(
        recipe,
        engine,
        parameters=parameters,
        steps=sum(each.steps for each in stretches),
        tokens=sum(each.steps * each.step_tokens for each in stretches),
        flops=_flops(stretches),
        memory_bytes=memory + parameters.total * 2 * recipe.optimisation.average_bytes,
        disk_bytes=parameters.total * ((CHECKPOINT_BYTES + recipe.optimisation.average_bytes) * kept + 4),
        teacher=teacher,
    )


@dataclass(frozen=True)
class _Stretch:
    """Updates that cost the same."""

    steps: int
    step_tokens: int
    step_flops: float


def _flops(stretches: Sequence[_Stretch]) -> float:
    total = 0.0
    for each in stretches:
        total += each.steps * each.step_flops
    return total


def _within(stretches: Sequence[_Stretch], flops: float) -> list[_Stretch]:
    """The first updates, as many as so many operations make; at least one."""
    found: list[_Stretch] = []
    for each in stretches:
        fitting = min(each.steps, int(flops / each.step_flops + 1e-6))
        found.append(replace(each, steps=max(fitting, 0 if found else 1)))
        flops -= fitting * each.step_flops
        if fitting < each.steps:
            break
    return found


def _mean_count(objective: Objective, stage: Stage, first: int, end: int) -> float:
    """An objective's predictions of one sequence, on average over some updates of the stage."""
    return objective.mean_expected_count(
        stage.recipe.data.sequence_length, first / stage.run_steps, end / stage.run_steps
    )
