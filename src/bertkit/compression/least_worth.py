"""The heads that are worth least to a task: importance is measured on the loss of its training examples.

Michel, Levy and Neubig 2019, arXiv:1905.10650, sections 4.1 and 4.2. What importance is, is probes/heads.py's to say;
sibling pruned.py takes the heads out.

Shapes: T packed tokens, D width, L layers, N heads of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from bertkit.compression.head_importance import ExampleBatch, Floats, Measure, least_first
from bertkit.models.headed import HeadedModel
from bertkit.training.method import TrainingData


class TrainingLoss(Measure):
    """The loss that the task is learnt by, of some of its training items; the score is the mean.

    Args:
        model: with the task's head.
        data: what is learnt.
        items: numbers of the items.
    """

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


def least_worth(worth_LN: Floats, present_LN: Floats, count: int) -> dict[int, list[int]]:
    """The heads that go, by layer: those of least worth, equal ones by their number, but the best of each layer stays.

    Args:
        worth_LN: of all heads.
        present_LN: 1 where there is a head, 0 where it is gone.
        count: how many go; at most all but one a layer.
    """
    per_layer = worth_LN.shape[1]
    left = present_LN.sum(axis=1)
    chosen: dict[int, list[int]] = {}
    for number in least_first(worth_LN).tolist():
        layer, head = divmod(number, per_layer)
        if count == 0:
            break
        if present_LN[layer, head] and left[layer] > 1:
            chosen.setdefault(layer, []).append(head)
            left[layer] -= 1
            count -= 1
    return {layer: sorted(heads) for layer, heads in sorted(chosen.items())}
