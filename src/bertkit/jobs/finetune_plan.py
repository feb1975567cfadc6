"""What a fine-tuning run would cost, before it is begun: the document of `--plan`.

FLOPs and memory as in training/cost.py, on the examples as they are read; the time as in plan.py, for every run of a
suite together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bertkit.jobs.finetune_data import prepare
from bertkit.jobs.finetune_suite import FinetuneRequest, members, requested_recipe
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import read_config
from bertkit.recipe.hashing import what_hash
from bertkit.training.cost import count_parameters, measured_peak_flops, step_flops, training_memory_bytes
from bertkit.training.finetune import EpochOrder

_REACHED_SHARE = 0.65
_CHECKPOINT_BYTES = 3 * 4
"""A checkpoint holds a weight and two moments a parameter, each float32."""


def finetuning_plan(request: FinetuneRequest) -> dict[str, Any]:
    """Parameters, steps, tokens, FLOPs, memory, disk and time of all runs that are asked for.

    Tokens and FLOPs are those of the real sequences, training only. Settings of a grid are taken to cost what their own
    epochs and batch make of the same sequences.
    """
    recipe = requested_recipe(request)
    prepared = prepare(recipe, offline=request.offline)
    engine = recipe.engine.resolve()
    config, contents = read_config(prepared.model_directory)
    with torch.device("meta"):
        model = HeadedModel(config.build(contents["vocab_size"]), [prepared.task.head], labels=prepared.task.labels)
    parameters = count_parameters(model)
    features = prepared.train.features
    lengths = np.diff(features.starts_S1).astype(np.float64)
    epoch_flops = step_flops(
        model,
        tokens=float(lengths.sum()),
        squared_lengths=float((lengths**2).sum()),
        predictions=0,
        sequences=lengths.size,
    )
    runs = members(recipe, request.seeds or [recipe.seed], request.grid)
    steps, passes = 0, 0.0
    for run in runs:
        optimisation = run.recipe.optimisation
        assert optimisation.epochs is not None
        assert optimisation.batch_sequences is not None
        order = EpochOrder(features.num_items, optimisation.batch_sequences, run.recipe.seed)
        own = order.steps(optimisation.epochs, optimisation.max_steps)
        steps += own
        passes += own / order.steps_per_epoch
    flops = passes * epoch_flops
    rate = measured_peak_flops(engine.device, bf16=engine.bf16) * _REACHED_SHARE
    micro_batch_tokens = min(engine.micro_batch_tokens, int(lengths.sum()))
    return {
        "recipe": recipe.name,
        "what_hash": what_hash(recipe),
        "parameters": {"total": parameters.total, "backbone": parameters.backbone},
        "steps": steps,
        "tokens": int(passes * lengths.sum()),
        "flops": flops,
        "memory_mb": training_memory_bytes(model, micro_batch_tokens=micro_batch_tokens, predictions=0) / 1e6,
        "disk_mb": parameters.total * (_CHECKPOINT_BYTES * 2 + 4 * len(runs)) / 1e6,
        "seconds": flops / rate,
    }
