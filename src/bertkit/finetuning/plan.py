"""The cost of fine-tuning, over all tasks and runs of a suite: the parts of `--plan` (training/plan.py).

Nothing here follows a paper. Tokens and FLOPs are those of the examples as they are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.label_counts import skipped_counts
from bertkit.finetuning.multitask import joined
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.sweep import sweep_runs
from bertkit.finetuning.task_order import TaskOrder
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import read_config
from bertkit.training.cost import CHECKPOINT_BYTES, count_parameters, step_flops, training_memory_bytes
from bertkit.training.engine import TASK_INTERVALS, resolve_engine
from bertkit.training.plan import plan_document


def finetuning_plan(arguments: FinetuneArguments) -> dict[str, Any]:
    """Parameters, steps, tokens, FLOPs, memory, disk and time of all runs of the command; labels with their counts.

    Tokens and FLOPs are those of the real sequences, training only, as if every weight learnt: a method that leaves the
    encoder as it is costs less. Settings of a grid are taken to cost what their own epochs and batch make of the same
    sequences. The passes of a teacher are counted, and stand under `teacher`.
    """
    recipe = arguments.new_recipe()
    prepared = [arguments.prepare(each) for each in recipe.alone]
    parts = [_Part.of(each) for each in prepared]
    engine = resolve_engine(recipe.engine, TASK_INTERVALS)
    model = joined([part.model for part in parts])
    parameters = count_parameters(model)
    runs = sweep_runs(recipe, arguments.seeds or [recipe.seed], arguments.grid)
    steps, tokens, flops = 0, 0.0, 0.0
    recipes = [recipe for run in runs for recipe in (arguments.before(run.recipe), run.recipe) if recipe is not None]
    read: list[tuple[FinetuneRecipe, float]] = []
    for each_recipe in recipes:
        optimisation = each_recipe.optimisation
        assert optimisation.epochs is not None
        order = TaskOrder.of(each_recipe, prepared)
        own = order.steps(optimisation.epochs, optimisation.steps)
        steps += own
        read.append((each_recipe, own / order.steps_per_epoch))
        for part, each, count in zip(parts, order.orders, order.steps_by_task, strict=True):
            epochs = own / order.steps_per_epoch * count / each.steps_per_epoch
            tokens += epochs * part.tokens
            flops += epochs * part.epoch_flops * each_recipe.method.gradient(each_recipe.seed).passes
    micro_batch_tokens = min(engine.micro_batch_tokens, max(part.tokens for part in parts))
    document = plan_document(
        recipe,
        engine,
        parameters=parameters,
        steps=steps,
        tokens=tokens,
        flops=flops,
        memory_bytes=training_memory_bytes(parts[0].model, micro_batch_tokens=micro_batch_tokens, predictions=0)
        + parameters.total * 2 * recipe.optimisation.average_bytes,
        disk_bytes=parameters.total * ((CHECKPOINT_BYTES + recipe.optimisation.average_bytes) * 2 + 4 * len(recipes)),
        teacher=arguments.planned_teacher(prepared, read),
    )
    prefixes = [f"{each.spec.name}/" if len(prepared) > 1 else "" for each in prepared]
    counts = {
        f"{at}{s}": own for at, each in zip(prefixes, prepared, strict=True) for s, own in each.label_counts.items()
    }
    splits = {f"{at}{s}": own for at, each in zip(prefixes, prepared, strict=True) for s, own in each.read.items()}
    return document | {"labels": counts, "skipped": skipped_counts(splits)}


@dataclass(frozen=True)
class _Part:
    """One task: its model without weights, and the cost of an epoch of its examples."""

    model: HeadedModel
    tokens: int
    epoch_flops: float

    @classmethod
    def of(cls, prepared: Prepared) -> _Part:
        _, contents = read_config(prepared.model_directory)
        with torch.device("meta"):
            model = HeadedModel(
                prepared.config.build(contents["vocab_size"]), [prepared.task.head], labels=prepared.task.labels
            )
        features = prepared.train.features
        lengths = np.diff(features.starts_S1).astype(np.float64)
        flops = step_flops(
            model,
            tokens=float(lengths.sum()),
            squared_lengths=float((lengths**2).sum()),
            predictions=0,
            sequences=lengths.size,
        )
        return cls(model, int(lengths.sum()), flops)
