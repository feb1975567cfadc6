"""A pass of prediction over encoded examples.

Sequences of similar length are computed together; outputs are in the order of the items.

Shapes: I items.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertkit.arrays import Int64Array
from bertkit.models.headed import HeadedModel
from bertkit.progress import Progress, silent_progress
from bertkit.ranks import current
from bertkit.tasks.base import Features, Task
from bertkit.training.engine import Engine

WINDOW_ITEMS = 16_384
"""Number of items within which sequences are sorted by length."""


def prediction_batches(features: Features, max_tokens: int) -> Iterator[Int64Array]:
    """All items in batches of at most `max_tokens` tokens, sorted by length within large windows."""
    for first in range(0, features.num_examples, WINDOW_ITEMS):
        yield from features.cut(np.arange(first, min(first + WINDOW_ITEMS, features.num_examples)), max_tokens)


@torch.inference_mode()
def predict(
    model: HeadedModel,
    task: Task,
    features: Features,
    engine: Engine,
    *,
    progress: Progress = silent_progress,
    label: str = "predictions",
) -> list[NDArray[Any]]:
    """The head's outputs for each item, without dropout; `label` names the pass on the display.

    Several ranks share the work. It runs in single precision even if training does not, so a run's predictions equal
    those of `predict` and `eval`.
    """
    model.eval()
    ranks = current()
    outputs: dict[int, NDArray[Any]] = {}
    with progress(label, total=features.num_examples, unit="sequences") as meter:
        for number, items in enumerate(prediction_batches(features, engine.micro_batch_tokens)):
            if number % ranks.count != ranks.rank:
                continue
            batch = features.batch(items).to(engine.device)
            found = task.decode(model, model.states(task.head, batch.packed), batch)
            outputs.update(zip(items.tolist(), found, strict=True))
            meter.update(len(outputs))
    outputs = {item: found for own in ranks.gathered(outputs) for item, found in own.items()}
    return [outputs[item] for item in range(features.num_examples)]
