"""Shared projections as an objective: a student's parameters near those of the teacher that trains beside it.

Zhao et al. 2019, arXiv:1909.11687v1: the loss is the teacher's masked LM on mixed words, the student's masked LM, and
epsilon times the distance of the parameters (`weight` here; its value was not to be found). The formula and what is
matched are those of projections.py. Unlike the other objectives it reads no batch: it counts once in
each micro-batch, so that its mean is the distance itself however a batch is cut.

Here, too, is what such a student has beside it while it trains: its teacher (mixed_vocabulary.py) and the projections.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.dual_teacher import TEACHER, DualTeacher, teacher_of
from bertkit.distillation.mixed_vocabulary import BesideTeacher, MixedVocabulary
from bertkit.distillation.projections import (
    PROJECTIONS,
    Direction,
    Part,
    Projections,
    pairs_of,
    projections_of,
    sizes_of,
)
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.objectives.base import Objective


class SharedProjections(BesideTeacher):
    """Squared distance between the parameters of both models, through learnt matrices that all layers share."""

    weight: float = Field(0.01, ge=0, description="Factor of the distance in the total loss (the paper's epsilon).")
    direction: Literal["down", "up", "both"] = Field(
        "down", description="down: the teacher's parameters in the student's sizes; up: the student's in the teacher's."
    )
    parts: tuple[Part, ...] = Field(
        ("layers", "embeddings", "head"), min_length=1, description="Which parameters are compared."
    )

    term: ClassVar[str] = "shared_projections"
    has_accuracy: ClassVar[bool] = False

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Down, up, or both."""
        return ("down", "up") if self.direction == "both" else (self.direction,)

    def errors_beside(self, objectives: Sequence[Objective]) -> list[str]:
        if not any(isinstance(each, MixedVocabulary) for each in objectives):
            return [
                "objective.shared_projections needs mixed_vocabulary beside it, which trains the teacher; add it (with"
                " student_share: 0 the teacher reads its own pieces alone)"
            ]
        return []

    def expected_count(self, length: int) -> float:
        return 1.0

    def count(self, batch: PackedBatch) -> int:
        return 1

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """The distance, once."""
        projections, pairs = projections_of(model), pairs_of(model, teacher_of(model), self.parts)
        distances = [projections.distance(pairs, direction) for direction in self.directions]
        total = sum(distances[1:], start=distances[0])
        return LossSum(total, 1, torch.zeros_like(total, dtype=torch.int64))


DUAL: dict[str, type[BesideTeacher]] = {kind.term: kind for kind in (MixedVocabulary, SharedProjections)}
"""The objectives of a teacher that trains beside its student, by the name that a recipe gives them."""


def beside_teacher(objectives: Sequence[Objective]) -> tuple[BesideTeacher, ...]:
    """Those of these objectives that need a teacher that trains along."""
    return tuple(objective for objective in objectives if isinstance(objective, BesideTeacher))


def add_teacher(student: HeadedModel, objectives: Sequence[Objective], teacher: HeadedModel, *, seed: int) -> None:
    """Put the teacher that these objectives train beside the student, and the projections that they need.

    Args:
        student: both train with it, are kept in its checkpoints, and are never written with it.
        objectives: of all stages.
        teacher: is changed.
        seed: of what is drawn.

    Raises:
        DataError: the teacher cannot read two vocabularies.
        UsageError: the two models are not of one shape.
    """
    if not beside_teacher(objectives):
        return
    dual = DualTeacher(teacher, student.encoder.vocab_size, seed=_seed_of(seed, TEACHER))
    student.companions[TEACHER] = dual
    projecting = [each for each in objectives if isinstance(each, SharedProjections)]
    for each in projecting:
        pairs_of(student, dual, each.parts)
    directions = tuple(dict.fromkeys(direction for each in projecting for direction in each.directions))
    if directions:
        sizes = sizes_of(student, dual.model)
        student.companions[PROJECTIONS] = Projections(sizes, directions, seed=_seed_of(seed, PROJECTIONS))


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
