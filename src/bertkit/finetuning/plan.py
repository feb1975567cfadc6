"""What a fine-tuning run would cost, before it is begun: the document of `--plan`.

FLOPs and memory as in training/cost.py, on the examples as they are read; the time as in plan.py, for every run of a
suite together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bertkit.finetuning.arguments import FinetuneRequest
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.multitask import joined
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.sweep import members
from bertkit.finetuning.task_order import EpochOrder, TaskOrder
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import read_config
from bertkit.recipe.hashing import what_hash
from bertkit.training.cost import (
    CHECKPOINT_BYTES,
    REACHED_SHARE,
    count_parameters,
    measured_peak_flops,
    step_flops,
    training_memory_bytes,
)
from bertkit.training.engine import TASK_INTERVALS, resolve_engine


def finetuning_plan(request: FinetuneRequest) -> dict[str, Any]:
    """Parameters, steps, tokens, FLOPs, memory, disk and time of all runs that are asked for.

    Tokens and FLOPs are those of the real sequences, training only, as if every weight learnt: a method that leaves the
    encoder as it is costs less. Settings of a grid are taken to cost what their own epochs and batch make of the same
    sequences. The passes of a teacher are counted, and stand under `teacher`.
    """
    recipe = request.requested()
    prepared = [request.prepare(each) for each in recipe.alone]
    parts = [_Part.of(each) for each in prepared]
    engine = resolve_engine(recipe.engine, TASK_INTERVALS)
    model = joined([part.model for part in parts])
    parameters = count_parameters(model)
    runs = members(recipe, request.seeds or [recipe.seed], request.grid)
    steps, tokens, flops = 0, 0.0, 0.0
    recipes = [recipe for run in runs for recipe in (request.before(run.recipe), run.recipe) if recipe is not None]
    read: list[tuple[FinetuneRecipe, float]] = []
    for each_recipe in recipes:
        optimisation = each_recipe.optimisation
        assert optimisation.epochs is not None
        assert optimisation.batch_sequences is not None
        orders = [EpochOrder(part.num_items, optimisation.batch_sequences, each_recipe.seed) for part in parts]
        order = TaskOrder(tuple(orders), each_recipe.seed, optimisation.task_smoothing)
        own = order.steps(optimisation.epochs, optimisation.steps)
        steps += own
        read.append((each_recipe, own / order.steps_per_epoch))
        for part, each, count in zip(parts, orders, order.steps_by_task, strict=True):
            epochs = own / order.steps_per_epoch * count / each.steps_per_epoch
            tokens += epochs * part.tokens
            flops += epochs * part.epoch_flops * each_recipe.method.gradient(each_recipe.seed).passes
    teacher = request.teacher_plan(prepared, read)
    flops += 0.0 if teacher is None else teacher["flops"]
    rate = measured_peak_flops(engine.device, bf16=engine.bf16) * REACHED_SHARE
    micro_batch_tokens = min(engine.micro_batch_tokens, max(part.tokens for part in parts))
    return {
        "recipe": recipe.name,
        "what_hash": what_hash(recipe),
        "parameters": {"total": parameters.total, "backbone": parameters.backbone},
        "steps": steps,
        "tokens": int(tokens),
        "flops": flops,
        "memory_mb": training_memory_bytes(parts[0].model, micro_batch_tokens=micro_batch_tokens, predictions=0) / 1e6,
        "disk_mb": parameters.total * (CHECKPOINT_BYTES * 2 + 4 * len(recipes)) / 1e6,
        "seconds": flops / rate,
        **({} if teacher is None else {"teacher": teacher}),
    }


@dataclass(frozen=True)
class _Part:
    """What one task brings: its model without weights, and what an epoch of its examples amounts to."""

    model: HeadedModel
    num_items: int
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
        return cls(model, features.num_items, int(lengths.sum()), flops)
