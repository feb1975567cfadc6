"""The cost of an evaluation's fine-tuning before it starts: the document of `--plan`.

Not from a paper. A task's entry is what `bertkit finetune --plan` gives for its runs (finetuning/plan.py). Sibling
plan.py decides which runs there are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bertkit.evaluation.plan import PlannedEvaluation, TaskEvaluation, finetune_arguments
from bertkit.finetuning.plan import finetuning_plan, models_mb

_SUMMED = ("runs", "steps", "tokens", "flops", "optimizer_flops", "seconds")


def evaluation_plan(evaluation: TaskEvaluation) -> dict[str, Any]:
    """Runs, steps, tokens, FLOPs, memory, disk and time of fine-tuning, for each task and in total.

    Predicting is not counted. Tasks are trained one after the other, and a finished run keeps only its model: memory is
    that of the task that needs most, and disk that of all models and of one task's checkpoints.

    Raises:
        UsageError, DataError: as the evaluation itself before it trains.
    """
    whole = PlannedEvaluation.of(evaluation)
    tasks: dict[str, dict[str, Any]] = {}
    for task in whole.tasks:
        if task.recipes:
            request = finetune_arguments(evaluation, task.spec, task.use)
            tasks[task.spec.name] = finetuning_plan(replace(request, seeds=evaluation.seeds))
    models = {name: models_mb(own) for name, own in tasks.items()}
    return {
        "suite": evaluation.suite,
        "model": evaluation.arguments.model,
        **{key: sum(own[key] for own in tasks.values()) for key in _SUMMED},
        "memory_mb": max((own["memory_mb"] for own in tasks.values()), default=0.0),
        "disk_mb": sum(models.values())
        + max((own["disk_mb"] - models[name] for name, own in tasks.items()), default=0.0),
        "tasks": tasks,
        "evaluated_as_is": whole.evaluated_as_is,
        "left_out": whole.left_out,
    }
