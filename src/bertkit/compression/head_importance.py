"""The worth of each attention head: gradient importance, single ablation, one head per layer, pruning curves.

Michel, Levy and Neubig 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650. The output of every head h
is multiplied by a gate xi_h; 1 changes nothing, 0 removes the head (section 2.3). Its importance is

    I_h = mean over examples x of |d L(x) / d xi_h| at xi = 1                                       (section 4.1)

Variant: the absolute value of each example's own gradient, as in the paper's text. Here every example has its own
gates, so one backward pass over a batch yields all gradients and the batch size changes nothing; code that takes the
absolute value of a batch's summed gradient measures something else. The importance is divided by the L2 norm over the
layer's heads (same section) before heads of different layers are ranked together.

Gates are edits of the recorder at `blocks.N.attn.hook_z`. A `Measure` defines loss and score.

Shapes: T packed tokens, I examples of a batch, L layers, N heads of a layer, H head width, D width, X sets of gates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import Float64Array, Int64Array
from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.conversion.pruning import require_equal_heads
from bertkit.models.headed import HeadedModel
from bertkit.models.hook_points import of_layers, point_shapes
from bertkit.models.recorder import Recorder

Done = Callable[[int], None]
"""Called with the number of finished examples or scores."""
HEAD_OUTPUTS = "blocks.{n}.attn.hook_z"
_LENGTHS = (3, 4)
"""Lengths of the two sequences with which a model's heads are found."""


@dataclass(frozen=True, eq=False)
class ExampleBatch:
    """Some examples, packed.

    Attributes:
        packed: their sequences.
        example_B: the example (from 0) of each sequence.
        items: number of examples.
        content: data for the measure, such as targets.
    """

    packed: PackedBatch
    example_B: Tensor
    items: int
    content: Any

    @property
    def item_T(self) -> Tensor:
        """The example of each token."""
        lengths_B = self.packed.sequences.cu_seqlens_B1.diff().long()
        return torch.repeat_interleave(self.example_B, lengths_B, output_size=self.packed.num_tokens)


class Measure(ABC):
    """Loss and score of a model on some examples.

    Args:
        model: moved to the device and to evaluation mode; its weights no longer get gradients.

    Attributes:
        metric: the name of the score, with its unit if it has one.
        higher_is_better: whether higher scores are better.
        examples: number of examples.
    """

    metric: str
    higher_is_better: bool
    examples: int
    _batches: Sequence[ExampleBatch]

    def __init__(self, model: HeadedModel, device: torch.device) -> None:
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device

    def batches(self) -> Sequence[ExampleBatch]:
        """All examples, on the device; the same at every call."""
        return self._batches

    @abstractmethod
    def loss(self, hidden_TD: Tensor, batch: ExampleBatch) -> Tensor:
        """The sum of the examples' losses, none of which depends on another example; a scalar in nats."""

    @abstractmethod
    def outputs(self, hidden_TD: Tensor, batch: ExampleBatch) -> Any:
        """What `score` needs from a batch."""

    @abstractmethod
    def score(self, outputs: Sequence[Any]) -> float:
        """The score over the outputs of all batches, in order; NaN if the metric is undefined."""

    def loss_of_score(self, before: float, after: Float64Array) -> Float64Array:
        """How much worse scores are than a previous one, in the score's unit; negative if they are better."""
        return before - after if self.higher_is_better else after - before


@dataclass(frozen=True)
class Heads:
    """The heads of a model.

    Attributes:
        points: hook points of each layer's head outputs, (T, N, H).
        per_layer: N.
    """

    points: tuple[str, ...]
    per_layer: int

    @classmethod
    def of(cls, model: HeadedModel) -> Heads:
        """The heads of a model.

        Raises:
            DataError: the model has no heads that can be gated individually.
        """
        require_equal_heads(model.encoder)
        shapes = point_shapes(model, _LENGTHS)
        points = of_layers(shapes, HEAD_OUTPUTS)
        found = {shapes[point][:2] for point in points}
        if len(found) != 1 or next(iter(found))[0] != sum(_LENGTHS):
            kind = model.encoder.config.model_type
            raise DataError(
                f"models of the family {kind} have no attention heads to switch off (no head outputs at"
                f" {HEAD_OUTPUTS.format(n=0)}, equally many in every layer); `bertkit probe points` lists its points"
            )
        return cls(points, next(iter(found))[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(L, N)."""
        return len(self.points), self.per_layer

    def all_on(self) -> Float64Array:
        """Gates that change nothing, (L, N)."""
        return np.ones(self.shape)


def _gate(gate: Tensor) -> Callable[[Tensor], Tensor]:
    """The edit that multiplies the heads' outputs by gates: the same for all tokens, (N,), or of each, (T, N)."""
    return lambda output_TNH: output_TNH * gate[..., None].to(output_TNH.dtype)


def gated(heads: Heads, gate_LN: Float64Array, device: torch.device) -> Recorder:
    """The recorder that sets these gates; layers whose gates are all 1 are not edited."""
    return Recorder(
        edits={
            point: _gate(torch.tensor(gate_N, dtype=torch.float32, device=device))
            for point, gate_N in zip(heads.points, gate_LN, strict=True)
            if not (gate_N == 1).all()
        }
    )


def head_importance(measure: Measure, heads: Heads, *, done: Done | None = None) -> Float64Array:
    """I_h of every head, (L, N), in nats, not normalised.

    Raises:
        DataError: gradients are not finite.
    """
    sums_LN = torch.zeros(heads.shape, dtype=torch.float64)
    seen = 0
    for batch in measure.batches():
        item_T = batch.item_T
        gates = [
            torch.ones(batch.items, heads.per_layer, device=measure.device, requires_grad=True) for _ in heads.points
        ]
        edits = {point: _gate(gate_IN[item_T]) for point, gate_IN in zip(heads.points, gates, strict=True)}
        with torch.enable_grad():
            hidden_TD = measure.model(batch.packed, Recorder(edits=edits))
            gradients = torch.autograd.grad(measure.loss(hidden_TD, batch), gates)
        sums_LN += torch.stack([gradient_IN.abs().double().sum(0).cpu() for gradient_IN in gradients])
        seen += batch.items
        if done is not None:
            done(seen)
    if not sums_LN.isfinite().all():
        raise DataError("the gradients of the heads' gates are not finite: the model's weights are damaged or diverged")
    importance_LN: Float64Array = (sums_LN / seen).numpy()
    return importance_LN


def normalised_by_layer(importance_LN: Float64Array) -> Float64Array:
    """Each layer's row divided by its L2 norm; a row of zeros is unchanged."""
    norm_L1 = np.linalg.norm(importance_LN, axis=1, keepdims=True)
    found: Float64Array = importance_LN / np.where(norm_L1 > 0, norm_L1, 1.0)
    return found


@torch.inference_mode()
def gated_score(measure: Measure, heads: Heads, gate_LN: Float64Array) -> float:
    """The score of the model with these gates."""
    recorder = gated(heads, gate_LN, measure.device)
    return measure.score([measure.outputs(measure.model(each.packed, recorder), each) for each in measure.batches()])


def ablate_each_head(measure: Measure, heads: Heads, *, done: Done | None = None) -> Float64Array:
    """The score without head h, for every single h, (L, N) (section 3.2)."""
    gates_XLN = 1 - np.eye(heads.shape[0] * heads.per_layer).reshape(-1, *heads.shape)
    return np.reshape(_scores(measure, heads, gates_XLN, done), heads.shape)


def ablate_all_but_one(measure: Measure, heads: Heads, *, done: Done | None = None) -> Float64Array:
    """The score if h is the only head that its layer keeps, for every h, (L, N) (section 3.3)."""
    gates_XLN = np.ones((heads.shape[0] * heads.per_layer, *heads.shape))
    for gate_LN, (layer, head) in zip(gates_XLN, np.ndindex(heads.shape), strict=True):
        gate_LN[layer] = np.arange(heads.per_layer) == head
    return np.reshape(_scores(measure, heads, gates_XLN, done), heads.shape)


def _scores(measure: Measure, heads: Heads, gates_XLN: Iterable[Float64Array], done: Done | None) -> list[float]:
    """The score under each set of gates."""
    scores = []
    for gate_LN in gates_XLN:
        scores.append(gated_score(measure, heads, gate_LN))
        if done is not None:
            done(len(scores))
    return scores


def least_important_first(importance_scores_LN: Float64Array) -> Int64Array:
    """Heads (layer x N + head) in the order in which they are pruned: least worth first, then by number; NaN last."""
    return np.argsort(importance_scores_LN.ravel(), kind="stable")


def pruned_counts(heads: int, share: float) -> list[int]:
    """The number of heads removed after each step, from none to all; a step prunes a share of them, at least one."""
    steps = max(1, int(np.ceil(1 / share - 1e-9)))
    return sorted({min(heads, round(step * share * heads)) for step in range(steps + 1)} | {heads})


def pruning_curve(measure: Measure, heads: Heads, order_A: Int64Array, counts: Sequence[int]) -> list[float]:
    """The score after each number of heads is removed, in the given order (section 4.2)."""
    rank_A = np.argsort(order_A)
    gates = ((rank_A >= count).astype(float).reshape(heads.shape) for count in counts)
    return _scores(measure, heads, gates, None)
