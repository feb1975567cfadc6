"""Shared projections: a teacher's parameters mapped to its student's sizes, and the student's to the teacher's.

Zhao et al. 2019, arXiv:1909.11687v1, shared variable projections. Not states are compared but parameters:

    down = sum over pairs |U^T W_teacher V - W_student|^2,    up = sum over pairs |W_teacher - U' W_student V'|^2,

with projections that all layers share, and that go when the student is finished. One-dimensional parameters are mapped
on their one side. Here U maps what a layer gives out and V what it reads; the sides of the feed-forward's inner width
have a pair of their own. Siblings in terms/ compare what the two models make of a batch.

Pairs are parameters of the same name: those of the layers (attention, feed-forward, norms), of the masked LM's head
but its bias, and of the embeddings, whose rows are not mapped: positions (as many as both have), segments, and the
student's words with the teacher's table of the same words. Not matched: the teacher's own words and both output biases,
which belong to one vocabulary. Which parameters the paper pairs beyond those of the layers was not to be found.

Shapes: t and s the teacher's and the student's size of one side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from bertkit.distillation.dual_teacher import DualTeacher
from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel

Direction = Literal["down", "up"]
Part = Literal["layers", "embeddings", "head"]
Side = Literal["width", "inner"]

PROJECTIONS = "projections"
"""A student's companion of this name holds its shared projections, while it trains."""
_WORDS = "encoder.embeddings.word.weight"
_OUTPUT_BIAS = "masked_lm.bias"


@dataclass(frozen=True)
class Pair:
    """A parameter of the student and its counterpart.

    Attributes:
        name: the student's.
        sides: what each axis is: the models' width, their feed-forward's, or None for rows that are not mapped.
        student, teacher: the parameters.
    """

    name: str
    sides: tuple[Side | None, ...]
    student: Tensor
    teacher: Tensor


class Projections(nn.ParameterDict):
    """The learnt matrices, named DIRECTION_(out|in)_SIDE, each from the size that it maps to the size that it makes.

    Args:
        sizes: the teacher's and the student's of each side.
        directions: down, up or both.
        seed: by which they are drawn: normal, with the variance of one over the size that is mapped, so that what is
            mapped keeps its size.
    """

    def __init__(self, sizes: Mapping[Side, tuple[int, int]], directions: Sequence[Direction], *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = {}
        for direction in directions:
            for side, (of_teacher, of_student) in sizes.items():
                shape = (of_teacher, of_student) if direction == "down" else (of_student, of_teacher)
                for end in ("out", "in"):
                    matrix = torch.randn(shape, generator=generator) / shape[0] ** 0.5
                    drawn[f"{direction}_{end}_{side}"] = nn.Parameter(matrix)
        super().__init__(drawn)

    def mapped(self, parameter: Tensor, sides: Sequence[Side | None], direction: Direction) -> Tensor:
        """A parameter of one model in the sizes of the other: U^T W V, or W U where only one side is mapped."""
        mapped: Tensor
        if sides[0] is not None and len(sides) == 2:
            mapped = self[f"{direction}_out_{sides[0]}"].t() @ parameter @ self[f"{direction}_in_{sides[1]}"]
        else:
            mapped = parameter @ self[f"{direction}_out_{sides[-1]}"]
        return mapped

    def distance(self, pairs: Sequence[Pair], direction: Direction) -> Tensor:
        """The sum of the squared differences of all pairs, a scalar, in float32."""
        with torch.autocast(pairs[0].student.device.type, enabled=False):
            total = pairs[0].student.new_zeros(())
            for pair in pairs:
                given, wanted = (pair.teacher, pair.student) if direction == "down" else (pair.student, pair.teacher)
                total = total + (self.mapped(given, pair.sides, direction) - wanted).square().sum()
        return total


def pairs_of(student: HeadedModel, teacher: DualTeacher, parts: Sequence[Part]) -> tuple[Pair, ...]:
    """The parameters that are compared.

    Raises:
        UsageError: a parameter of the student has no counterpart, for the two are not of one shape.
    """
    theirs = {**dict(teacher.model.named_parameters()), _WORDS: teacher.students.weight}
    sizes = sizes_of(student, teacher.model)
    pairs = []
    for name, parameter in student.named_parameters():
        if _part(name) not in parts:
            continue
        sides, found = _sides(name, parameter.ndim), theirs.get(name)
        if found is None or not (_fits(found, sides, sizes, 0) and _fits(parameter, sides, sizes, 1)):
            raise UsageError(
                f"objective.shared_projections: the student's {name} {tuple(parameter.shape)} has no counterpart in its"
                f" teacher ({'none' if found is None else tuple(found.shape)} there); both must be of one shape: write"
                " model.family: bert with the teacher's num_hidden_layers"
            )
        rows = min(len(parameter), len(found)) if sides[0] is None else None
        pairs.append(Pair(name, sides, parameter[:rows], found[:rows]))
    return tuple(pairs)


def sizes_of(student: HeadedModel, teacher: HeadedModel) -> dict[Side, tuple[int, int]]:
    """The teacher's and the student's size of each side."""
    inner = [int(getattr(model.encoder.config, "intermediate_size", 0)) for model in (teacher, student)]
    return {"width": (teacher.encoder.width, student.encoder.width), "inner": (inner[0], inner[1])}


def projections_of(student: HeadedModel) -> Projections:
    """The projections that train beside a student."""
    found = student.companions[PROJECTIONS]
    assert isinstance(found, Projections)
    return found


def _part(name: str) -> Part | None:
    """The part that a parameter of the student belongs to; None where it is not compared."""
    if name.startswith("encoder."):
        return "embeddings" if name.startswith("encoder.embeddings.") else "layers"
    return "head" if name.startswith("masked_lm.") and name != _OUTPUT_BIAS else None


def _sides(name: str, axes: int) -> tuple[Side | None, ...]:
    """What the axes of a parameter of BERT's are; of a matrix the first is what it gives out."""
    sides: tuple[Side | None, ...] = ("width", "width")
    if ".feed_forward.inner." in name:
        sides = ("inner", "width")
    elif ".feed_forward.outer." in name:
        sides = ("width", "inner")
    elif name.startswith("encoder.embeddings.") and axes == 2:
        sides = (None, "width")
    return sides[:axes]


def _fits(parameter: Tensor, sides: Sequence[Side | None], sizes: Mapping[Side, tuple[int, int]], which: int) -> bool:
    wanted = [None if side is None else sizes[side][which] for side in sides]
    return parameter.ndim == len(sides) and all(
        size is None or size == found for size, found in zip(wanted, parameter.shape, strict=True)
    )
