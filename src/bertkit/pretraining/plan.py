"""The cost of a pretraining run, stage by stage: the parts of `--plan` (training/plan.py).

Nothing here follows a paper.
"""

from __future__ import annotations

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
from bertkit.training.plan import PlannedTeacher, plan_document


def pretraining_plan(
    recipe: Recipe, *, vocab_size: int | None = None, teacher: PlannedTeacher | None = None
) -> dict[str, Any]:
    """Parameters, steps, tokens, FLOPs, memory, disk and time; sequences are taken at their full length.

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
    tokens = flops = memory = 0.0
    for stage in stages:
        length = stage.recipe.data.sequence_length
        for first, end, sequences in stage.batch_sizes.pieces(stage.first_step, stage.end_step):
            predictions = head_rows(stage.recipe.objectives, partial(_mean_count, stage=stage, first=first, end=end))
            in_all = sum(count for head, count in predictions.items() if HEAD_KINDS[head] == "vocabulary")
            tokens += (end - first) * sequences * length
            flops += (end - first) * step_flops(
                model,
                tokens=sequences * length,
                squared_lengths=sequences * length**2,
                predictions={head: sequences * count for head, count in predictions.items()},
                sequences=sequences,
            )
            micro_batch = min(engine.micro_batch_tokens, sequences * length)
            memory = max(
                memory,
                training_memory_bytes(model, micro_batch_tokens=micro_batch, predictions=in_all * micro_batch / length),
            )
    kept = engine.intervals.keep_checkpoints + 1
    return plan_document(
        recipe,
        engine,
        parameters=parameters,
        steps=recipe.optimisation.steps,
        tokens=tokens,
        flops=flops,
        memory_bytes=memory + parameters.total * 2 * recipe.optimisation.average_bytes,
        disk_bytes=parameters.total * ((CHECKPOINT_BYTES + recipe.optimisation.average_bytes) * kept + 4),
        teacher=teacher,
        hours=recipe.optimisation.schedule.hours,
    )


def _mean_count(objective: Objective, stage: Stage, first: int, end: int) -> float:
    """An objective's predictions of one sequence, on average over some updates of the stage."""
    return objective.mean_expected_count(
        stage.recipe.data.sequence_length, first / stage.run_steps, end / stage.run_steps
    )
