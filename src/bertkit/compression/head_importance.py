"""What each attention head is worth: importance by gradient, ablation one by one, one head a layer, pruning curves.

Michel, Levy and Neubig 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650. Every head h has a gate
xi_h that its output is multiplied by; 1 changes nothing, 0 removes the head (section 2.3). Its importance is

    I_h = mean over examples x of |d L(x) / d xi_h| at xi = 1                                       (section 4.1)

Variant: the absolute value of each example's own gradient, as in the paper's text. Every example has gates of its own
here, so one backward pass over a batch gives them all and the batch's size changes nothing; code that takes the
absolute value of a batch's summed gradient measures something else. Divided by the L2 norm over the layer's heads
(same section) before heads of different layers are put in one order.

Gates are edits of the recorder at `blocks.N.attn.hook_z`. What is asked of the model, and how well it answers, is a
`Measure`: head_measures.py. Sibling attention.py says where heads look, not what it is good for.

Shapes: T packed tokens, I examples of a batch, L layers, N heads of a layer, H head width, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder, point_shapes

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]
Done = Callable[[int], None]
"""Told how many examples, or scores, are done."""
HEAD_OUTPUTS = "blocks.{n}.attn.hook_z"
_LENGTHS = (3, 4)
"""Tokens of two sequences that a model is tried on."""


def ignore(done: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True, eq=False)
class Asked:
    """Some examples, packed.

    Attributes:
        packed: their sequences.
        item_B: the example (from 0) that each sequence belongs to.
        items: how many examples.
        content: what the measure needs again.
    """

    packed: PackedBatch
    item_B: Tensor
    items: int
    content: Any

    @property
    def item_T(self) -> Tensor:
        """The example that each token belongs to."""
        lengths_B = self.packed.sequences.cu_seqlens_B1.diff().long()
        return torch.repeat_interleave(self.item_B, lengths_B, output_size=self.packed.num_tokens)


class Measure(ABC):
    """What a model is asked on some examples, and how well it answers.

    Args:
        model: put on the device and out of training mode; its weights no longer take gradients.
        device: where to compute.

    Attributes:
        metric: the name of the score, with its unit where it has one.
        higher_is_better: of the score.
        examples: how many.
    """

    metric: str
    higher_is_better: bool
    examples: int

    def __init__(self, model: HeadedModel, device: torch.device) -> None:
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device

    @abstractmethod
    def batches(self) -> Sequence[Asked]:
        """All examples, on the device; the same ones every time."""

    @abstractmethod
    def loss(self, hidden_TD: Tensor, asked: Asked) -> Tensor:
        """The sum of the examples' losses, none of which depends on another example; a scalar in nats."""

    @abstractmethod
    def answers(self, hidden_TD: Tensor, asked: Asked) -> Any:
        """What `score` needs to know of a batch."""

    @abstractmethod
    def score(self, answers: Sequence[Any]) -> float:
        """Of all batches in their order; NaN where the metric is not defined."""

    def loss_of_score(self, before: float, after: Floats) -> Floats:
        """How much worse scores are than one of before, in the score's unit; negative where they are better."""
        return before - after if self.higher_is_better else after - before


@dataclass(frozen=True)
class Heads:
    """The heads that a model has.

    Attributes:
        points: of each layer's outputs of heads, (T, N, H).
        per_layer: N.
    """

    points: tuple[str, ...]
    per_layer: int

    @classmethod
    def of(cls, model: HeadedModel) -> Heads:
        """Those of a model.

        Raises:
            DataError: it has none that can be gated one by one.
        """
        device = next(model.parameters()).device
        shapes = point_shapes(model, PackedBatch.from_ids([[0] * length for length in _LENGTHS]).to(device))
        points: list[str] = []
        while (name := HEAD_OUTPUTS.format(n=len(points))) in shapes:
            points.append(name)
        found = {shapes[point][:2] for point in points}
        if len(found) != 1 or next(iter(found))[0] != sum(_LENGTHS):
            kind = model.encoder.config.model_type
            raise DataError(
                f"a model of the family {kind} has no attention heads to switch off (no outputs of heads at"
                f" {HEAD_OUTPUTS.format(n=0)}, as many in every layer); `bertkit probe points` lists what it has"
            )
        return cls(tuple(points), next(iter(found))[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(L, N)."""
        return len(self.points), self.per_layer

    def all_on(self) -> Floats:
        """Gates that change nothing, (L, N)."""
        return np.ones(self.shape)


class _Gate:
    """Multiplies the heads' outputs by their gates: of all tokens alike, (N,), or of each, (T, N)."""

    def __init__(self, gate: Tensor) -> None:
        self._gate = gate

    def __call__(self, mixed_TNH: Tensor) -> Tensor:
        return mixed_TNH * self._gate[..., None].to(mixed_TNH.dtype)


def gated(heads: Heads, gate_LN: Floats, device: torch.device) -> Recorder:
    """The recorder under which a model's heads have these gates; layers whose gates are all 1 are left alone."""
    return Recorder(
        edits={
            point: _Gate(torch.tensor(gate_N, dtype=torch.float32, device=device))
            for point, gate_N in zip(heads.points, gate_LN, strict=True)
            if not (gate_N == 1).all()
        }
    )


def head_importance(measure: Measure, heads: Heads, *, done: Done = ignore) -> Floats:
    """I_h of every head, (L, N), in nats, not normalised.

    Raises:
        DataError: gradients that are not numbers.
    """
    sums_LN = torch.zeros(heads.shape, dtype=torch.float64)
    seen = 0
    for asked in measure.batches():
        item_T = asked.item_T
        gates = [
            torch.ones(asked.items, heads.per_layer, device=measure.device, requires_grad=True) for _ in heads.points
        ]
        edits = {point: _Gate(gate_IN[item_T]) for point, gate_IN in zip(heads.points, gates, strict=True)}
        with torch.enable_grad():
            hidden_TD = measure.model(asked.packed, Recorder(edits=edits))
            gradients = torch.autograd.grad(measure.loss(hidden_TD, asked), gates)
        sums_LN += torch.stack([gradient_IN.abs().double().sum(0).cpu() for gradient_IN in gradients])
        seen += asked.items
        done(seen)
    if not sums_LN.isfinite().all():
        raise DataError("the gradients of the heads' gates are not numbers: the weights are damaged or diverged")
    importance_LN: Floats = (sums_LN / seen).numpy()
    return importance_LN


def normalised_by_layer(importance_LN: Floats) -> Floats:
    """Each layer's row divided by its L2 norm; a row of zeros stays."""
    norm_L1 = np.linalg.norm(importance_LN, axis=1, keepdims=True)
    found: Floats = importance_LN / np.where(norm_L1 > 0, norm_L1, 1.0)
    return found


@torch.inference_mode()
def gated_score(measure: Measure, heads: Heads, gate_LN: Floats) -> float:
    """The score of the model with these gates."""
    recorder = gated(heads, gate_LN, measure.device)
    return measure.score([measure.answers(measure.model(asked.packed, recorder), asked) for asked in measure.batches()])


def without_each(measure: Measure, heads: Heads, *, done: Done = ignore) -> Floats:
    """The score without head h, for every h alone, (L, N) (section 3.2)."""
    return _each(measure, heads, _without, done)


def each_alone_in_its_layer(measure: Measure, heads: Heads, *, done: Done = ignore) -> Floats:
    """The score where h is the only head that its layer keeps, for every h, (L, N) (section 3.3)."""
    return _each(measure, heads, _alone, done)


def _without(gate_LN: Floats, layer: int, head: int) -> None:
    gate_LN[layer, head] = 0.0


def _alone(gate_LN: Floats, layer: int, head: int) -> None:
    gate_LN[layer] = 0.0
    gate_LN[layer, head] = 1.0


def _each(measure: Measure, heads: Heads, change: Callable[[Floats, int, int], None], done: Done) -> Floats:
    scores_LN = np.zeros(heads.shape)
    for number, (layer, head) in enumerate(np.ndindex(heads.shape), 1):
        gate_LN = heads.all_on()
        change(gate_LN, layer, head)
        scores_LN[layer, head] = gated_score(measure, heads, gate_LN)
        done(number)
    return scores_LN


def least_first(worth_LN: Floats) -> Int64s:
    """Heads (layer x N + head) in the order in which they are pruned: least worth first, then by number; NaN last."""
    return np.argsort(worth_LN.ravel(), kind="stable")


def pruned_counts(heads: int, share: float) -> list[int]:
    """How many heads are gone after each step, from none to all.

    Args:
        heads: of the model.
        share: of the heads that a step prunes; one head is the least.
    """
    steps = max(1, int(np.ceil(1 / share - 1e-9)))
    return sorted({min(heads, round(step * share * heads)) for step in range(steps + 1)} | {heads})


def pruning_curve(
    measure: Measure, heads: Heads, order_A: Int64s, counts: Sequence[int], *, done: Done = ignore
) -> list[float]:
    """The score after each count of heads is gone, in the given order (section 4.2)."""
    scores = []
    for number, count in enumerate(counts, 1):
        gate_A = np.ones(order_A.size)
        gate_A[order_A[:count]] = 0.0
        scores.append(gated_score(measure, heads, gate_A.reshape(heads.shape)))
        done(number)
    return scores
