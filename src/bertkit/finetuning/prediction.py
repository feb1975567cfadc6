"""A pass of prediction over encoded examples.

Nothing here follows a paper. Sequences are sorted by length, so that few are gathered with longer ones; the order of
the outputs is that of the items.

Shapes: I items.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertkit.models.headed import HeadedModel
from bertkit.progress import Progress, silent_progress
from bertkit.tasks.base import Features, Task
from bertkit.training.engine import Engine

_WINDOW_ITEMS = 16_384
"""Items among which sequences are sorted by length."""


def prediction_batches(features: Features, max_tokens: int) -> Iterator[NDArray[np.int64]]:
    """All items in batches of at most `max_tokens` tokens, sorted by length within large windows."""
    for first in range(0, features.num_examples, _WINDOW_ITEMS):
        yield from features.cut(np.arange(first, min(first + _WINDOW_ITEMS, features.num_examples)), max_tokens)


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
    """What the head gives for each item, in their order, without dropout; `label` names them on the display.

    In single precision even where training is not: what a run saves of its dev set is then what `predict` and `eval`
    give.
    """
    model.eval()
    outputs: dict[int, NDArray[Any]] = {}
    with progress(label, total=features.num_examples, unit="sequences") as meter:
        for items in prediction_batches(features, engine.micro_batch_tokens):
            batch = features.batch(items).to(engine.device)
            found = task.decode(model, model.states(task.head, batch.packed), batch)
            outputs.update(zip(items.tolist(), found, strict=True))
            meter.update(len(outputs))
    return [outputs[item] for item in range(features.num_examples)]
