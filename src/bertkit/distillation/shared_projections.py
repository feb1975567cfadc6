"""Shared projections as an objective: keeps a student's parameters close to those of the teacher trained with it.

Zhao et al. 2019, arXiv:1909.11687v1, shared variable projections: the loss is the teacher's masked LM on mixed words,
the student's masked LM, and epsilon (`weight` here; its value is not in the paper) times a distance between parameters,

    down = sum over pairs |U^T W_teacher V - W_student|^2,    up = sum over pairs |W_teacher - U' W_student V'|^2,

with projections that all layers share and that are dropped when training ends. One-dimensional parameters are mapped on
their only axis. Here U maps the output of a layer and V its input; the axes of the feed-forward's inner width have
their own pair. The siblings in terms/ compare outputs and states of the two models, not their parameters.

Pairs are parameters of the same name: those of the layers (attention, feed-forward, norms), of the masked-LM head
except its bias, and of the embeddings, whose rows are not mapped: positions (as many as both have), segments, and the
student's words with the teacher's table of the same words. Not paired: the teacher's own words and both output biases,
which belong to one vocabulary. The paper does not say which parameters it pairs besides those of the layers.

Shapes: t and s the teacher's and the student's size of one axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.data.random import derived_seed
from bertkit.distillation.dual_teacher import TEACHER, DualTeacher, teacher_of
from bertkit.distillation.mixed_vocabulary import MixedVocabulary, TeacherObjective
from bertkit.distillation.terms import ShapePair
from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.objectives.base import Objective

Direction = Literal["down", "up"]
Part = Literal["layers", "embeddings", "head"]
Side = Literal["width", "inner"]

PARAMETER_PROJECTIONS = "projections"
"""During training, the student's companion of this name contains its shared projections."""
_WORDS = "encoder.embeddings.word.weight"
_OUTPUT_BIAS = "masked_lm.bias"


class SharedProjections(TeacherObjective):
    """Squared distance between the parameters of both models, compared through trained matrices that all layers share.

    It reads no batch and counts once per micro-batch, so its mean is the distance itself, however a batch is split.
    """

    weight: float = Field(0.01, ge=0, description="Weight of the distance in the total loss (the paper's epsilon).")
    direction: Literal["down", "up", "both"] = Field(
        "down",
        description="down: the teacher's parameters are projected to the student's sizes; up: the student's to the"
        " teacher's; both: both.",
    )
    parts: tuple[Part, ...] = Field(
        ("layers", "embeddings", "head"), min_length=1, description="Groups of parameters to compare."
    )

    term: ClassVar[str] = "shared_projections"
    has_accuracy: ClassVar[bool] = False

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Down, up, or both."""
        return ("down", "up") if self.direction == "both" else (self.direction,)

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        if not any(isinstance(each, MixedVocabulary) for each in objectives):
            return [
                "objective.shared_projections needs mixed_vocabulary, which trains the teacher; add it (with"
                " student_share: 0 the teacher reads only its own tokens)"
            ]
        return []

    def compares(self, shapes: ShapePair) -> str:
        return f"parameters of {', '.join(self.parts)}, {' and '.join(self.directions)}"

    def expected_count(self, length: int) -> float:
        return 1.0

    def count(self, batch: PackedBatch) -> int:
        return 1

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """The distance, with a count of one."""
        projections, pairs = parameter_projections_of(model), pairs_of(model, teacher_of(model), self.parts)
        distances = [projections.distance(pairs, direction) for direction in self.directions]
        total = sum(distances[1:], start=distances[0])
        return LossSum(total, 1, torch.zeros_like(total, dtype=torch.int64))


def teacher_objectives(objectives: Sequence[Objective]) -> tuple[TeacherObjective, ...]:
    """Those of these objectives that need a teacher that is trained, too."""
    return tuple(objective for objective in objectives if isinstance(objective, TeacherObjective))


def add_teacher(student: HeadedModel, objectives: Sequence[Objective], teacher: HeadedModel, *, seed: int) -> None:
    """Add to the student the teacher that these objectives train, and the projections that they need.

    Args:
        student: teacher and projections train with it and are saved in its checkpoints, but never exported with it.
        objectives: of all stages.
        teacher: is modified.
        seed: for initialising new weights.

    Raises:
        DataError: the teacher cannot read two vocabularies.
        UsageError: the two models do not have the same shape.
    """
    if not teacher_objectives(objectives):
        return
    dual = DualTeacher(teacher, student.encoder.vocab_size, seed=derived_seed(seed, TEACHER))
    student.companions[TEACHER] = dual
    projecting = [each for each in objectives if isinstance(each, SharedProjections)]
    for each in projecting:
        pairs_of(student, dual, each.parts)
    directions = tuple(dict.fromkeys(direction for each in projecting for direction in each.directions))
    if directions:
        sizes = sizes_of(student, dual.model)
        student.companions[PARAMETER_PROJECTIONS] = ParameterProjections(
            sizes, directions, seed=derived_seed(seed, PARAMETER_PROJECTIONS)
        )


@dataclass(frozen=True)
class Pair:
    """A parameter of the student and its counterpart.

    Attributes:
        name: the student's.
        sides: what each axis is: the model width, the feed-forward width, or None for rows that are not mapped.
        student, teacher: the parameters.
    """

    name: str
    sides: tuple[Side | None, ...]
    student: Tensor
    teacher: Tensor


class ParameterProjections(nn.ParameterDict):
    """The trained matrices, named DIRECTION_(out|in)_SIDE, each of size from x to.

    Args:
        sizes: the teacher's and the student's size of each side.
        directions: down, up or both.
        seed: for initialising them: normal, with variance 1 / (the size that is mapped), which preserves the size of
            what is mapped.
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
        """A parameter of one model in the sizes of the other: U^T W V, or W U if only one side is mapped."""
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
        UsageError: a parameter of the student has no counterpart because the two models differ in shape.
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
                f" teacher ({'none' if found is None else tuple(found.shape)} there); both must have the same shape:"
                " write model.family: bert with the teacher's num_hidden_layers"
            )
        rows = min(len(parameter), len(found)) if sides[0] is None else None
        pairs.append(Pair(name, sides, parameter[:rows], found[:rows]))
    return tuple(pairs)


def sizes_of(student: HeadedModel, teacher: HeadedModel) -> dict[Side, tuple[int, int]]:
    """The teacher's and the student's size of each side."""
    inner = [int(getattr(model.encoder.config, "intermediate_size", 0)) for model in (teacher, student)]
    return {"width": (teacher.encoder.width, student.encoder.width), "inner": (inner[0], inner[1])}


def parameter_projections_of(student: HeadedModel) -> ParameterProjections:
    """The projections that are trained with a student."""
    found = student.companions[PARAMETER_PROJECTIONS]
    assert isinstance(found, ParameterProjections)
    return found


def _part(name: str) -> Part | None:
    """The part that a parameter of the student belongs to; None if it is not compared."""
    if name.startswith("encoder."):
        return "embeddings" if name.startswith("encoder.embeddings.") else "layers"
    return "head" if name.startswith("masked_lm.") and name != _OUTPUT_BIAS else None


def _sides(name: str, axes: int) -> tuple[Side | None, ...]:
    """What the axes of a BERT parameter are; the first axis of a matrix is its output."""
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
