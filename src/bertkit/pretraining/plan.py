"""What a pretraining run would cost, before it is begun: the document of `--plan`.

FLOPs as in training/cost.py. The time is that of the FLOPs at 65% of the rate of a large matrix product measured here,
which is what training reaches where the matrices are large (docs/results.md); small models reach less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from bertkit.models.heads import HEAD_KINDS
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.stages import stages_of
from bertkit.recipe.hashing import what_hash
from bertkit.training.cost import (
    CHECKPOINT_BYTES,
    REACHED_SHARE,
    count_parameters,
    measured_peak_flops,
    step_flops,
    training_memory_bytes,
)
from bertkit.training.engine import resolve_engine


def pretraining_plan(recipe: Recipe, *, vocab_size: int | None = None) -> dict[str, Any]:
    """Parameters, steps, tokens, FLOPs, memory, disk and time; sequences are taken at their full length.

    Args:
        recipe: resolved.
        vocab_size: V where it is known; else the recipe's, of which a corpus too small for it gives less, and a smaller
            model.
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
        sequences = stage.recipe.optimisation.batch_sequences
        predictions = _predictions(stage.recipe.objectives, length)
        in_all = sum(predictions.values())
        steps = stage.end_step - stage.first_step
        tokens += steps * sequences * length
        flops += steps * step_flops(
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
    rate = measured_peak_flops(engine.device, bf16=engine.bf16) * REACHED_SHARE
    return {
        "recipe": recipe.name,
        "what_hash": what_hash(recipe),
        "parameters": {"total": parameters.total, "backbone": parameters.backbone},
        "steps": recipe.optimisation.steps,
        "tokens": int(tokens),
        "flops": flops,
        "memory_mb": memory / 1e6,
        "disk_mb": parameters.total * (CHECKPOINT_BYTES * (engine.intervals.keep_checkpoints + 1) + 4) / 1e6,
        "seconds": flops / rate,
    }


def _predictions(objectives: Sequence[Objective], length: int) -> dict[str, float]:
    """What each vocabulary head predicts of a sequence of this many tokens."""
    counts: dict[str, float] = defaultdict(float)
    for objective in objectives:
        for head in objective.heads:
            if HEAD_KINDS[head] == "vocabulary":
                counts[head] += objective.expected_count(length)
    return counts
