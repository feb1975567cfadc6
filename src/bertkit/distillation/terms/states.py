"""The terms that compare hidden states.

TinyBERT (Jiao et al. 2019, arXiv:1909.10351, section 4.1), DistilBERT (Sanh et al. 2019, arXiv:1910.01108, section 3),
PKD (Sun et al. 2019, arXiv:1908.09355, section 3.2), MobileBERT (Sun et al. 2020, arXiv:2004.02984, section 3.4).

A term is a mean over tokens of a mean over the width, summed over the pairs of layers. If the two widths differ, a
trained linear projection maps the student's states to the teacher's width. Layers and terms that give it the same name
share it, as all of TinyBERT's do.

Shapes: T packed tokens, B sequences, D width, M tokens or sequences.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.activations import Activations, ActivationSpec
from bertkit.distillation.losses import (
    cosine_distance,
    feature_map_error,
    mean_error,
    normalised_state_squared_error,
    state_squared_error,
    variance_error,
)
from bertkit.distillation.terms.base import DistillationTerm, OutputPair, ShapePair
from bertkit.errors import UsageError
from bertkit.models.conversion.layer_choice import MapName, Pairs
from bertkit.models.loss_sum import LossSum

_Layers = MapName | tuple[tuple[int, int], ...]
_LAYERS_HELP = (
    "Pairs of the student's and the teacher's layers to compare: uniform, skip, last, first, top, or pairs [[student's,"
    " teacher's], ...], counted from 1; 0 is the embeddings."
)


class StateTerm(DistillationTerm):
    """A term that compares the states of pairs of layers."""

    projection: str | None = Field(
        None,
        pattern=r"^(\w|\{layer\})+$",
        description="Name of the trained linear projection from the student's width to the teacher's. Terms with the"
        " same name share it; {layer} in the name stands for the student's layer. null: no projection, the widths must"
        " be equal.",
    )

    averages_layers: ClassVar[bool] = False
    """Whether the loss is a mean over the pairs of layers instead of a sum."""

    @abstractmethod
    def rows(self, student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
        """The loss of each row, (M,)."""

    def specs(self, shapes: ShapePair) -> tuple[ActivationSpec, ActivationSpec]:
        widths = shapes.widths
        if self.projection is None and widths[0] != widths[1]:
            raise UsageError(
                f"{self.term}.projection: the student's states have width {widths[0]}, the teacher's {widths[1]}; give"
                " the term a trained projection, such as projection: fit"
            )
        students, teachers = map(frozenset, zip(*self.layer_pairs(shapes), strict=True))
        return ActivationSpec(states=students), ActivationSpec(states=teachers)

    def count(self, batch: PackedBatch, rows: int) -> int:
        return batch.num_tokens

    def projections(self, shapes: ShapePair) -> Mapping[str, tuple[int, int]]:
        return {name: shapes.widths for layer, _ in self.layer_pairs(shapes) if (name := self._projection_of(layer))}

    def loss(self, pair: OutputPair) -> LossSum:
        pairs = self.layer_pairs(pair.shapes)

        def rows(layer: int, student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
            name = self._projection_of(layer)
            return self.rows(student_MD if name is None else pair.projections[name](student_MD), teacher_MD)

        total = pair.over_layers(self.states, rows, pairs)
        return LossSum(total.sum / len(pairs), total.count, total.correct) if self.averages_layers else total

    def states(self, activations: Activations) -> Mapping[int, Tensor]:
        """The states that are compared, by layer."""
        return activations.states

    def _projection_of(self, layer: int) -> str | None:
        return None if self.projection is None else self.projection.replace("{layer}", str(layer))


class LayerStates(StateTerm):
    """A term whose layers are set in the recipe."""

    layers: _Layers = Field("uniform", description=_LAYERS_HELP)

    def layer_pairs(self, shapes: ShapePair) -> Pairs:
        return shapes.layer_pairs(self.layers, term=self.term)


class HiddenStates(LayerStates):
    """The states after each layer: squared error."""

    term: ClassVar[str] = "hidden_states"

    def rows(self, student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
        return state_squared_error(student_MD, teacher_MD)


class EmbeddingStates(StateTerm):
    """The input of the first layers: squared error."""

    term: ClassVar[str] = "embeddings"

    def layer_pairs(self, shapes: ShapePair) -> Pairs:
        return ((0, 0),)

    def rows(self, student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
        return state_squared_error(student_MD, teacher_MD)


class Cosine(LayerStates):
    """The direction of states: 1 - cosine, by default of the last layers'."""

    term: ClassVar[str] = "cosine"

    layers: _Layers = Field("top", description=_LAYERS_HELP)

    def rows(self, student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
        return cosine_distance(student_MD, teacher_MD)


class Patience(LayerStates):
    """The states of the token that classifiers read, [CLS] in BERT, after intermediate layers: squared error, mean over
    sequences and pairs of layers, as in the paper's code (its equation 7 sums)."""

    term: ClassVar[str] = "patience"
    averages_layers: ClassVar[bool] = True

    layers: _Layers = Field("skip", description=_LAYERS_HELP)
    normalise: bool = Field(True, description="Normalise states to unit length before they are compared.")

    def specs(self, shapes: ShapePair) -> tuple[ActivationSpec, ActivationSpec]:
        own, theirs = super().specs(shapes)
        return ActivationSpec(summary_states=own.states), ActivationSpec(summary_states=theirs.states)

    def states(self, activations: Activations) -> Mapping[int, Tensor]:
        return activations.summary_states

    def count(self, batch: PackedBatch, rows: int) -> int:
        return batch.num_sequences

    def rows(self, student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
        error = normalised_state_squared_error if self.normalise else state_squared_error
        return error(student_MD, teacher_MD)


class FeatureMaps(LayerStates):
    """The feature maps of a layer and their statistics: MobileBERT's, mean over the pairs of layers."""

    term: ClassVar[str] = "feature_maps"
    averages_layers: ClassVar[bool] = True

    layers: _Layers = Field("first", description=_LAYERS_HELP)
    mean_weight: float = Field(
        50.0, ge=0, description="Weight, within the term, of the squared difference of the means."
    )
    variance_weight: float = Field(
        0.05, ge=0, description="Weight, within the term, of the absolute difference of the variances."
    )

    def rows(self, student_MD: Tensor, teacher_MD: Tensor) -> Tensor:
        statistics_M = self.mean_weight * mean_error(student_MD, teacher_MD)
        statistics_M = statistics_M + self.variance_weight * variance_error(student_MD, teacher_MD)
        return feature_map_error(student_MD, teacher_MD) + statistics_M
