"""Outputs of a task's head in which no example's bits depend on another example; used by the server.

Not from a paper; see independent_batches.py for the causes of such dependence, and embedder.py for the same with
vectors. A head has few columns, and a product of few columns is computed differently for rows whose address is not a
multiple of 16 bytes. Independence therefore requires an encoder width that is a multiple of four, as all published ones
are. In the sibling bertkit.finetuning.prediction, batches contain only their examples and use all threads.

Shapes: T packed tokens, B sequences, I examples.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from numpy.typing import NDArray

from bertkit.arrays import Int64Array
from bertkit.finetuning.prediction import predict, prediction_batches
from bertkit.inference.independent_batches import (
    each_on_one_thread,
    independent_batch,
    tokens_per_batch,
)
from bertkit.models.headed import HeadedModel
from bertkit.progress import Progress, silent_progress
from bertkit.tasks.base import Features, Task, TaskBatch
from bertkit.training.engine import Engine


def independent_outputs(
    model: HeadedModel,
    task: Task,
    features: Features,
    engine: Engine,
    *,
    progress: Progress = silent_progress,
    label: str = "predictions",
) -> list[NDArray[Any]]:
    """As `predict`; on a CPU an example's output is bit-identical for any other examples, except for ELMo's LSTMs and
    widths that are not a multiple of four."""
    if engine.device.type != "cpu":
        return predict(model, task, features, engine, progress=progress, label=label)
    model.eval()
    batches = list(prediction_batches(features, tokens_per_batch(features.tokens_I.tolist(), engine)))

    def computed(items: Int64Array) -> list[NDArray[Any]]:
        with torch.inference_mode():
            batch = filled(features.batch(items), model.encoder.max_tokens)
            hidden_TD = model(batch.packed)  # of all tokens: one token per sequence would be computed in other shapes
            return task.decode(model, hidden_TD, batch)[: items.size]

    outputs: dict[int, NDArray[Any]] = {}
    with progress(label, total=features.num_examples, unit="sequences") as meter:
        for items, found in zip(batches, each_on_one_thread(computed, batches), strict=True):
            outputs.update(zip(items.tolist(), found, strict=True))
            meter.update(len(outputs))
    return [outputs[item] for item in range(features.num_examples)]


def filled(batch: TaskBatch, max_tokens: int) -> TaskBatch:
    """The batch in a shape of `independent_batch`, followed by its fillers: one example each, each token a word."""
    ids_T, types_T = batch.packed.ids_T.tolist(), batch.packed.token_types_T.tolist()
    places = list(pairwise(batch.packed.sequences.cu_seqlens_B1.tolist()))
    # At least one filler, so that the last rows a head selects never belong to an example.
    packed = independent_batch(
        [*(ids_T[first:end] for first, end in places), ids_T[:1]],
        [*(types_T[first:end] for first, end in places), [0]],
        max_tokens=max_tokens,
    )
    examples, tokens = packed.num_sequences - len(places), packed.num_tokens - len(ids_T)
    number_B = torch.arange(batch.num_examples, batch.num_examples + examples)
    return TaskBatch(
        packed,
        torch.cat([batch.example_B, number_B]),
        {
            name: torch.cat([each, each[:1].expand(examples, *each.shape[1:])])
            for name, each in batch.example_labels.items()
        },
        {name: torch.cat([each, each.new_ones(tokens)]) for name, each in batch.token_labels.items()},
    )
