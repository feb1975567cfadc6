"""Which points of a model hold its layers' states: found by a forward pass, so that every family tells its own.

Layer 0 is what the first layer reads, the embeddings with everything that is added to them; layer l is what comes out
of the l-th. Where a family puts a norm behind the last layer, the last state is taken behind it, as `hidden_states` of
`transformers` has it. Sibling recorder.py keeps what is at these points.
"""

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


class Survey(Recorder):
    """A recorder that keeps nothing but the name and shape of every point it is offered.

    Attributes:
        shapes: by name, in the order of the forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, tuple[int, ...]] = {}

    def needs(self, point: str) -> bool:
        return True

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        self.shapes[point] = tuple(tensor.shape)
        return tensor


@torch.inference_mode()
def survey(model: HeadedModel, batch: PackedBatch) -> dict[str, tuple[int, ...]]:
    """Name and shape of everything that can be recorded, in the order of the forward pass."""
    seen = Survey()
    model.eval()(batch, seen)
    return seen.shapes


def point_shapes(model: HeadedModel, lengths: Sequence[int] = (2,)) -> dict[str, tuple[int, ...]]:
    """`survey` of sequences of these lengths, on the model's device."""
    return survey(model, PackedBatch.from_ids([[0] * length for length in lengths]).to(device_of(model)))


def of_layers(points: Collection[str], template: str) -> tuple[str, ...]:
    """The points of all layers whose names a template with `{n}` gives, in order."""
    return tuple(takewhile(lambda name: name in points, (template.format(n=number) for number in count())))


def device_of(model: HeadedModel) -> torch.device:
    """Where a model's weights are."""
    return next(model.parameters()).device


def layer_points(model: HeadedModel) -> tuple[str, ...]:
    """The point that holds each layer's states, the embeddings' first.

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
