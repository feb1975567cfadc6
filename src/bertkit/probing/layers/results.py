"""What `probe layers` measures of a task.

Sources as in probes/layers.py. Sibling layer_report.py writes it down.

Shapes: L layers, the embeddings counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bertkit.probing.layers.measure import Code, Floats, centre_of_gravity, divergence_from_uniform, expected_layer


@dataclass(frozen=True)
class LayerScore:
    """One layer's probe.

    Attributes:
        accuracy: on the test items.
        f1: conlleval's, of a task with chunks.
        code: of the training items' labels.
    """

    accuracy: float
    f1: float | None
    code: Code

    @property
    def score(self) -> float:
        """F1 where there are chunks, else accuracy."""
        return self.accuracy if self.f1 is None else self.f1


@dataclass(frozen=True)
class Controlled:
    """The control task.

    Attributes:
        accuracy: of each layer's probe.
        seen: share of the test items whose word occurs in training: what pure memory could reach.
    """

    accuracy: Sequence[float]
    seen: float


@dataclass(frozen=True, eq=False)
class Mixed:
    """A learnt mix of all layers.

    Attributes:
        weights_L: of the mix of all layers; they sum to 1.
        cumulative: the score of the mix of layers 0..l, for each l.
        accuracy: of the mix of all layers.
    """

    weights_L: Floats
    cumulative: Sequence[float]
    accuracy: float

    @property
    def centre(self) -> float:
        return centre_of_gravity(self.weights_L)

    @property
    def divergence(self) -> float:
        return divergence_from_uniform(self.weights_L)

    @property
    def expected_layer(self) -> float:
        return expected_layer(self.cumulative)


@dataclass(frozen=True, eq=False)
class TaskResult:
    """Everything of one task.

    Attributes:
        task: its name.
        labels: K.
        train_items, test_items: how many there are.
        majority: accuracy of the commonest label.
        layers: of the model.
        control: of the model.
        mix: of the model.
        random: of the same architecture with weights drawn anew.
    """

    task: str
    labels: int
    train_items: int
    test_items: int
    majority: float
    layers: Sequence[LayerScore]
    control: Controlled
    mix: Mixed
    random: Sequence[LayerScore] = field(default_factory=list)

    @property
    def metric(self) -> str:
        return "accuracy" if self.layers[0].f1 is None else "chunk F1"

    @property
    def scores(self) -> list[float]:
        """Of each layer."""
        return [each.score for each in self.layers]

    @property
    def best(self) -> int:
        """The layer of the highest score."""
        return int(np.argmax(self.scores))

    @property
    def selectivity(self) -> list[float]:
        """Accuracy less that on the control task, by layer."""
        return [each.accuracy - control for each, control in zip(self.layers, self.control.accuracy, strict=True)]
