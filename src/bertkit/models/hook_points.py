"""The names and shapes of a model's hook points, found by a forward pass, and the points of its layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count, takewhile

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder

FIRST_INPUT = "blocks.0.hook_resid_pre"
EMBEDDINGS = "hook_embed"
LAYER_OUTPUT = "blocks.{n}.hook_resid_post"
FINAL_NORM = "ln_final.hook_normalized"


class _ShapeRecorder(Recorder):
    """Records the shape of every point, but no tensor."""

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
    """`recordable_points` for sequences of these lengths, on the model's device."""
    return recordable_points(model, PackedBatch.from_ids([[0] * length for length in lengths]).to(device_of(model)))


def of_layers(points: Collection[str], template: str) -> tuple[str, ...]:
    """The points of all layers, in order; `template` is their name with `{n}` for the layer's number."""
    return tuple(takewhile(lambda name: name in points, (template.format(n=number) for number in count())))


def device_of(model: HeadedModel) -> torch.device:
    """The device of a model's weights."""
    return next(model.parameters()).device


def layer_points(model: HeadedModel) -> tuple[str, ...]:
    """The point of each layer's hidden states, found by a forward pass, as in `hidden_states` of `transformers`.

    The first is the input of the first layer, the sum of all embeddings. If the family has a norm after the last
    layer, the last point is the norm's output.

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
