"""Which heads are pruned: the least important ones for the loss on the task's training examples.

Michel, Levy and Neubig 2019, arXiv:1905.10650, sections 4.1 and 4.2. Sibling head_importance.py defines importance;
pruning.py removes the heads.

Shapes: T packed tokens, D width, L layers, N heads of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from bertkit.arrays import Float64Array
from bertkit.compression.head_importance import ExampleBatch, Measure, least_important_first
from bertkit.models.headed import HeadedModel
from bertkit.training.method import TrainingData


class TrainingLoss(Measure):
    """The task's loss on some of its training items; the score is its mean."""

    metric = "loss per example"
    higher_is_better = False

    def __init__(self, model: HeadedModel, data: TrainingData, items: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        super().__init__(model, data.engine.device)
        self.task = data.task
        self.examples = items.size
        self._parts = data.features.cut(items, data.engine.micro_batch_tokens)
        self._features = data.features

    def batches(self) -> Sequence[ExampleBatch]:
        batches = (self._features.batch(items).to(self.device) for items in self._parts)
        return [ExampleBatch(batch.packed, batch.example_B, batch.num_examples, batch) for batch in batches]

    def loss(self, hidden_TD: Tensor, batch: ExampleBatch) -> Tensor:
        return self.task.loss(self.model, hidden_TD, batch.content).sum

    def outputs(self, hidden_TD: Tensor, batch: ExampleBatch) -> float:
        return float(self.loss(hidden_TD, batch))

    def score(self, outputs: Sequence[float]) -> float:
        return sum(outputs) / self.examples


def heads_to_prune(importance_LN: Float64Array, present_LN: Float64Array, count: int) -> dict[int, list[int]]:
    """The `count` least important heads, by layer; ties by number. The best head of each layer is kept.

    Args:
        importance_LN: of all heads.
        present_LN: 1 where there is a head, 0 where it was pruned before.
        count: at most all but one per layer.
    """
    per_layer = importance_LN.shape[1]
    left = present_LN.sum(axis=1)
    chosen: dict[int, list[int]] = {}
    for number in least_important_first(importance_LN).tolist():
        layer, head = divmod(number, per_layer)
        if count == 0:
            break
        if present_LN[layer, head] and left[layer] > 1:
            chosen.setdefault(layer, []).append(head)
            left[layer] -= 1
            count -= 1
    return {layer: sorted(heads) for layer, heads in sorted(chosen.items())}
