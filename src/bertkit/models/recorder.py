"""Hook points: where a recorder reads and edits the tensors of a forward pass.

A model passes the tensor of every named point to the recorder, if there is one, and continues with what it returns;
without one the fast path runs untouched. Points have TransformerLens's names: `hook_embed`,
`blocks.3.attn.hook_pattern`, `blocks.3.hook_resid_post`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count, takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError

if TYPE_CHECKING:
    from bertkit.models.headed import HeadedModel

FIRST_INPUT = "blocks.0.hook_resid_pre"
EMBEDDINGS = "hook_embed"
LAYER_OUTPUT = "blocks.{n}.hook_resid_post"
FINAL_NORM = "ln_final.hook_normalized"

Edit = Callable[[Tensor], Tensor]


class Recorder:
    """Keeps the tensors of some points and replaces those of others.

    Args:
        wanted: names of the points to keep.
        edits: functions that replace a point's tensor, by name; they run before it is kept.

    Attributes:
        kept: tensors of the last forward pass, by name, still attached to the graph.
    """

    def __init__(self, wanted: Collection[str] = (), edits: Mapping[str, Edit] | None = None) -> None:
        self.wanted = frozenset(wanted)
        self.edits = dict(edits or {})
        self.kept: dict[str, Tensor] = {}

    def also(self, points: Collection[str]) -> Recorder:
        """A copy that keeps these points as well."""
        other = copy.copy(self)
        other.wanted, other.kept = self.wanted | frozenset(points), {}
        return other

    def needs(self, point: str) -> bool:
        """Whether a point must be computed: the fast path has no attention maps."""
        return point in self.wanted or point in self.edits

    def needs_within(self, prefix: str) -> bool:
        """Whether any point with this prefix must be computed."""
        return any(point.startswith(prefix) for point in (*self.wanted, *self.edits))

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        if point in self.edits:
            tensor = self.edits[point](tensor)
        if point in self.wanted:
            self.kept[point] = tensor
        return tensor


class Scope:
    """A recorder that prefixes the names of one module's points."""

    def __init__(self, recorder: Recorder | None, prefix: str) -> None:
        self.recorder = recorder
        self.prefix = prefix

    def needs(self, point: str) -> bool:
        return self.recorder is not None and self.recorder.needs(self.prefix + point)

    def tap(self, point: str, tensor: Tensor) -> Tensor:
        return tensor if self.recorder is None else self.recorder(self.prefix + point, tensor)

    def within(self, prefix: str) -> Scope:
        return Scope(self.recorder, self.prefix + prefix)


class _ShapeRecorder(Recorder):
    """Records the shape of every point and no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, tuple[int, ...]] = {}

    def needs(self, point: str) -> bool:
        return True

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        self.shapes[point] = tuple(tensor.shape)
        return tensor


@torch.inference_mode()
def recordable_points(model: HeadedModel, batch: PackedBatch) -> dict[str, tuple[int, ...]]:
    """Name and shape of every point, in the order of the forward pass."""
    recorder = _ShapeRecorder()
    model.eval()(batch, recorder)
    return recorder.shapes


def point_shapes(model: HeadedModel, lengths: Sequence[int] = (2,)) -> dict[str, tuple[int, ...]]:
    """`recordable_points` of sequences of these lengths, on the model's device."""
    return recordable_points(model, PackedBatch.from_ids([[0] * length for length in lengths]).to(device_of(model)))


def of_layers(points: Collection[str], template: str) -> tuple[str, ...]:
    """The points of all layers whose names a template with `{n}` gives, in order."""
    return tuple(takewhile(lambda name: name in points, (template.format(n=number) for number in count())))


def device_of(model: HeadedModel) -> torch.device:
    """The device of a model's weights."""
    return next(model.parameters()).device


def layer_points(model: HeadedModel) -> tuple[str, ...]:
    """The point of each layer's hidden states, found by a forward pass, as `hidden_states` of `transformers` has them.

    The first is the input of the first layer, the sum of all embeddings; of a family with a norm after the last layer,
    the last is its output.

    Raises:
        DataError: the family has no layers to record.
    """
    points = point_shapes(model)
    outputs = list(of_layers(points, LAYER_OUTPUT))
    first = FIRST_INPUT if FIRST_INPUT in points else EMBEDDINGS
    if not outputs or first not in points:
        kind = model.encoder.config.model_type
        raise DataError(f"a model of the family {kind} has no hidden states that can be recorded by layer")
    if FINAL_NORM in points:
        outputs[-1] = FINAL_NORM
    return (first, *outputs)
