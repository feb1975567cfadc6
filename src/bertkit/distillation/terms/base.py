"""The interface of a distillation term: what it records from student and teacher, and how it compares them.

A term is for a teacher what an objective is for a corpus: settings, a count that is known before the step, and a sum.
The siblings contain the terms: logits.py those on outputs, states.py and attention.py those on layers. The formulas are
in `bertkit.distillation.losses`. Layers are counted from 1; 0 is the embeddings.

Shapes: M rows of logits (examples of a task, or tokens of a text), D width, N heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.distillation.activations import Activations, ActivationSpec, ModelShape
from bertkit.errors import UsageError, below
from bertkit.models.conversion.layer_choice import MapName, Pairs, layer_map
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.operators.matmul import Linear
from bertkit.settings import Settings, UnreadKey

Recorded = TypeVar("Recorded")
"""What is recorded from a layer: states, or attention."""
LinearProjections = nn.ModuleDict
"""Trained linear maps from the student's states to the teacher's width, by name; dropped when training ends."""
PROJECTIONS = "distillation"
"""During training, the student's companion of this name contains its projections."""


@dataclass(frozen=True)
class ShapePair:
    """The shapes of student and teacher."""

    student: ModelShape
    teacher: ModelShape

    @classmethod
    def from_configs(cls, student: EncoderConfig, teacher: EncoderConfig) -> ShapePair:
        """The shapes of models with these settings."""
        return cls(ModelShape.from_config(student), ModelShape.from_config(teacher))

    @property
    def widths(self) -> tuple[int, int]:
        """D of both models."""
        return self.student.width, self.teacher.width

    @property
    def heads(self) -> tuple[int, int]:
        """N of both models."""
        return self.student.heads, self.teacher.heads

    def layer_pairs(self, layers: MapName | Pairs, *, term: str) -> Pairs:
        """The layers that are compared, as given by `layer_map`; `term` is named in its errors."""
        with below(term):
            return layer_map(layers, student=self.student.layers, teacher=self.teacher.layers)


@dataclass(frozen=True)
class OutputPair:
    """What was recorded from student and teacher on one batch, and what a comparison of the two depends on.

    Attributes:
        student, teacher: what was recorded from each.
        shapes: of both models.
        projections: from the student's states to the teacher's width.
    """

    student: Activations
    teacher: Activations
    shapes: ShapePair
    projections: LinearProjections

    def over_layers(
        self,
        recorded: Callable[[Activations], Mapping[int, Recorded]],
        loss_of: Callable[[int, Recorded, Recorded], Tensor],
        pairs: Pairs,
    ) -> LossSum:
        """The rows of all pairs of layers, added up row by row, so that a mean over rows is a sum over layers.

        Args:
            recorded: what is compared, by layer.
            loss_of: the loss of each row, given the student's layer and what was recorded from student and teacher.
            pairs: pairs of layers.
        """
        own, theirs = recorded(self.student), recorded(self.teacher)
        return summed(torch.stack([loss_of(m, own[m], theirs[n]) for m, n in pairs]).sum(dim=0))


class DistillationTerm(Settings, ABC):
    """One term of the comparison of a student with its teacher."""

    weight: float = Field(1.0, ge=0, description="Weight of this term's mean in the total loss.")

    term: ClassVar[str]
    """Its name in the recipe and in the metrics."""

    compares_logits: ClassVar[bool] = False
    """Whether it compares only logits and counts the rows where student and teacher choose the same class."""

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.weight == 0:
            why = "the term's weight is 0, so it is left out"
            yield from (UnreadKey(name, why) for name in type(self).model_fields if name != "weight")

    @abstractmethod
    def specs(self, shapes: ShapePair) -> tuple[ActivationSpec, ActivationSpec]:
        """What is recorded from the student, and what from the teacher.

        Raises:
            UsageError: the two models do not fit the term; the message starts with the term or its key, and names the
                remedy.
        """

    @abstractmethod
    def count(self, batch: PackedBatch, rows: int) -> int:
        """The number of rows that its loss sums.

        Args:
            batch: what both models read.
            rows: the number of rows of logits, M.
        """

    @abstractmethod
    def loss(self, pair: OutputPair) -> LossSum:
        """The summed loss; `correct` counts the rows where both choose the same class, or is 0."""

    def projections(self, shapes: ShapePair) -> Mapping[str, tuple[int, int]]:
        """The trained projections that it needs: input and output width by name."""
        return {}

    def layer_pairs(self, shapes: ShapePair) -> Pairs:
        """Which layers it compares: (student's, teacher's)."""
        return ()


def summed(loss_M: Tensor, *, agreeing: Tensor | None = None) -> LossSum:
    """The loss of each row as a sum and a count."""
    correct = loss_M.new_zeros((), dtype=torch.int64) if agreeing is None else agreeing.sum()
    return LossSum(loss_M.sum(), loss_M.numel(), correct)


def specs_of(
    terms: Sequence[DistillationTerm], shapes: ShapePair, *, key: str
) -> tuple[ActivationSpec, ActivationSpec]:
    """What all terms together record from the student, and from the teacher.

    Args:
        terms: of a recipe.
        shapes: of the two models.
        key: of the terms in the recipe, for the message.

    Raises:
        UsageError: the two models do not fit a term.
    """
    student, teacher = ActivationSpec(), ActivationSpec()
    for term in terms:
        with below(key):
            own, theirs = term.specs(shapes)
        student, teacher = student | own, teacher | theirs
    return student, teacher


def layer_terms(terms: Sequence[DistillationTerm]) -> list[str]:
    """The names of the terms that compare layers."""
    return [term.term for term in terms if not term.compares_logits]


def check_single_teacher(terms: Sequence[DistillationTerm], teachers: int, *, key: str) -> None:
    """Check that several teachers are compared by their logits only.

    Args:
        terms: of a recipe.
        teachers: how many there are.
        key: of the terms in the recipe, for the message.

    Raises:
        UsageError: a term compares the layers of several teachers.
    """
    if teachers > 1 and (inside := layer_terms(terms)):
        raise UsageError(
            f"{key}.{inside[0]}: compares layers, but several teachers act as one through the mean of their logits;"
            " give a single teacher, or leave the term out"
        )


_INITIAL_SPREAD = 0.02
"""Standard deviation of a projection's initial weights, as in TinyBERT's modeling.py (init_bert_weights)."""


def new_projections(terms: Sequence[DistillationTerm], shapes: ShapePair, *, seed: int) -> LinearProjections:
    """The projections of all terms, initialised from the seed; biases are zero.

    Raises:
        UsageError: student and teacher do not fit a term.
    """
    widths: dict[str, tuple[int, int]] = {}
    for term in terms:
        widths |= term.projections(shapes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = {name: Linear(*sizes) for name, sizes in sorted(widths.items())}
        for projection in found.values():
            nn.init.normal_(projection.weight, std=_INITIAL_SPREAD)
            nn.init.zeros_(projection.bias)
        return LinearProjections(found)


def add_projections(student: HeadedModel, terms: Sequence[DistillationTerm], shapes: ShapePair, *, seed: int) -> None:
    """Add the projections of all terms to the student: they are trained with it but never exported with it."""
    projections = new_projections(terms, shapes, seed=seed)
    if projections:
        student.companions[PROJECTIONS] = projections


def projections_of(student: HeadedModel) -> LinearProjections:
    """The projections of `add_projections`; empty if no term needs any."""
    found = student.companions[PROJECTIONS] if PROJECTIONS in student.companions else LinearProjections()
    assert isinstance(found, LinearProjections)
    return found
