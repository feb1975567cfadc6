"""What the layers hold: the terms that compare hidden states.

TinyBERT (Jiao et al. 2019, arXiv:1909.10351, section 4.1), DistilBERT (Sanh et al. 2019, arXiv:1910.01108, section 3),
PKD (Sun et al. 2019, arXiv:1908.09355, section 3.2), MobileBERT (Sun et al. 2020, arXiv:2004.02984, section 3.4).

A mean over tokens of a mean over the width, added up over the pairs of layers. Where the two widths differ, a learnt
linear map takes the student's states to the teacher's; layers and terms that call it by the same name share it, as all
of TinyBERT's do.

Shapes: T packed tokens, B sequences, D width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.losses import (
    cosine_distance,
    feature_map_error,
    mean_error,
    normalised_state_squared_error,
    state_squared_error,
    variance_error,
)
from bertkit.distillation.terms.base import Activations, ActivationSpec, LinearMaps, Sizes, Term, over_layers
from bertkit.errors import UsageError
from bertkit.models.layer_choice import MapName, Pairs, layer_map
from bertkit.models.loss_sum import LossSum

_Layers = MapName | tuple[tuple[int, int], ...]
_LAYERS_HELP = (
    "Which of the student's layers learns from which of the teacher's: uniform, skip, last, first, top, or pairs"
    " [[student's, teacher's], ...], counted from 1, 0 being the embeddings."
)


class StateTerm(Term):
    """A term that compares the states of pairs of layers."""

    projection: str | None = Field(
        None,
        pattern=r"^(\w|\{layer\})+$",
        description="Name of the learnt linear map from the student's width to the teacher's; what has the same name"
        " shares it, {layer} in it stands for the student's layer; null: the widths must be equal.",
    )

    needs_equal_widths: ClassVar[bool] = True
    """Whether states of different widths cannot be compared without a map."""

    @abstractmethod
    def pairs(self, sizes: Sizes) -> Pairs:
        """The layers that are compared."""

    @abstractmethod
    def rows(self, student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
        """The loss of each row, (M,)."""

    def wants(self, sizes: Sizes) -> tuple[ActivationSpec, ActivationSpec]:
        widths = sizes.student.width, sizes.teacher.width
        if self.needs_equal_widths and self.projection is None and widths[0] != widths[1]:
            raise UsageError(
                f"{self.term}: the student's states are {widths[0]} wide, the teacher's {widths[1]}; give the term a"
                " learnt map, as projection: fit"
            )
        pairs = self.pairs(sizes)
        return ActivationSpec(states=frozenset(m for m, _ in pairs)), ActivationSpec(
            states=frozenset(n for _, n in pairs)
        )

    def count(self, batch: PackedBatch, rows: int) -> int:
        return batch.num_tokens

    def maps(self, sizes: Sizes) -> Mapping[str, tuple[int, int]]:
        widths = sizes.student.width, sizes.teacher.width
        return {name: widths for layer, _ in self.pairs(sizes) if (name := self._map_name(layer)) is not None}

    def loss(self, student: Activations, teacher: Activations, sizes: Sizes, maps: LinearMaps) -> LossSum:
        def of_pair(m: int, n: int) -> Tensor:
            name = self._map_name(m)
            states = self.states(student)[m]
            return self.rows(states if name is None else maps[name](states), self.states(teacher)[n])

        return over_layers(of_pair, self.pairs(sizes))

    def states(self, seen: Activations) -> Mapping[int, Tensor]:
        """Those that are compared."""
        return seen.states

    def table(self, sizes: Sizes) -> Pairs:
        return self.pairs(sizes)

    def _map_name(self, layer: int) -> str | None:
        return None if self.projection is None else self.projection.replace("{layer}", str(layer))


class HiddenStates(StateTerm):
    """The states behind layers: squared error."""

    term: ClassVar[str] = "hidden_states"

    layers: _Layers = Field("uniform", description=_LAYERS_HELP)

    def pairs(self, sizes: Sizes) -> Pairs:
        return layer_map(self.layers, student=sizes.student.layers, teacher=sizes.teacher.layers)

    def rows(self, student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
        return state_squared_error(student_MD, teacher_MD)


class EmbeddingStates(StateTerm):
    """What the first layers read: squared error."""

    term: ClassVar[str] = "embeddings"

    def pairs(self, sizes: Sizes) -> Pairs:
        return ((0, 0),)

    def rows(self, student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
        return state_squared_error(student_MD, teacher_MD)


class Cosine(StateTerm):
    """The direction of states: 1 - cosine, by default of the last layers'."""

    term: ClassVar[str] = "cosine"

    layers: _Layers = Field("top", description=_LAYERS_HELP)

    def pairs(self, sizes: Sizes) -> Pairs:
        return layer_map(self.layers, student=sizes.student.layers, teacher=sizes.teacher.layers)

    def rows(self, student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
        return cosine_distance(student_MD, teacher_MD)


class Patience(StateTerm):
    """The states of the first tokens behind intermediate layers: squared error, mean over sequences and pairs of
    layers, as the paper's code has it (its equation 7 sums)."""

    term: ClassVar[str] = "patience"

    layers: _Layers = Field("skip", description=_LAYERS_HELP)
    normalise: bool = Field(True, description="Bring states to length 1 before they are compared.")

    def pairs(self, sizes: Sizes) -> Pairs:
        return layer_map(self.layers, student=sizes.student.layers, teacher=sizes.teacher.layers)

    def wants(self, sizes: Sizes) -> tuple[ActivationSpec, ActivationSpec]:
        student, teacher = super().wants(sizes)
        return ActivationSpec(first_states=student.states), ActivationSpec(first_states=teacher.states)

    def states(self, seen: Activations) -> Mapping[int, Tensor]:
        return seen.first_states

    def count(self, batch: PackedBatch, rows: int) -> int:
        return batch.num_sequences

    def rows(self, student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
        error = normalised_state_squared_error if self.normalise else state_squared_error
        return error(student_MD, teacher_MD)

    def loss(self, student: Activations, teacher: Activations, sizes: Sizes, maps: LinearMaps) -> LossSum:
        part = super().loss(student, teacher, sizes, maps)
        return LossSum(part.sum / len(self.pairs(sizes)), part.count, part.correct)


class FeatureMaps(StateTerm):
    """The feature maps of a layer and their statistics: MobileBERT's, mean over the pairs of layers."""

    term: ClassVar[str] = "feature_maps"

    layers: _Layers = Field("first", description=_LAYERS_HELP)
    mean_weight: float = Field(50.0, ge=0, description="Factor of the means' squared difference, within the term.")
    variance_weight: float = Field(
        0.05, ge=0, description="Factor of the variances' absolute difference, within the term."
    )

    def pairs(self, sizes: Sizes) -> Pairs:
        return layer_map(self.layers, student=sizes.student.layers, teacher=sizes.teacher.layers)

    def rows(self, student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
        statistics_M = self.mean_weight * mean_error(student_MD, teacher_MD)
        statistics_M = statistics_M + self.variance_weight * variance_error(student_MD, teacher_MD)
        return feature_map_error(student_MD, teacher_MD) + statistics_M

    def loss(self, student: Activations, teacher: Activations, sizes: Sizes, maps: LinearMaps) -> LossSum:
        part = super().loss(student, teacher, sizes, maps)
        return LossSum(part.sum / len(self.pairs(sizes)), part.count, part.correct)
