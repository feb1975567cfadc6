"""What a term of distillation is: what it must see of student and teacher, and how far apart it finds them.

A term is to a teacher what an objective is to a corpus: settings, a count that is known before the step, and a sum.
Siblings hold the terms: logits.py of what the models say, states.py and attention.py of what goes on inside. The
formulas are those of `bertkit.distillation.losses`.

Layers are counted from 1, the embeddings being 0.

Shapes: T packed tokens, B sequences, M rows of logits (examples of a task, or tokens of a text), K classes, D width,
N heads, S longest sequence.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder, layer_points
from bertkit.settings import Settings

LinearMaps = nn.ModuleDict
"""Learnt linear maps from the student's states to the teacher's, by name; they go when the student is finished."""
MAPS = "distillation"
"""A student's companion of this name holds its learnt maps while it trains."""
_ANY_VOCABULARY = 7
_SCORES = "blocks.{n}.attn.hook_attn_scores"


@dataclass(frozen=True)
class ActivationSpec:
    """What must be seen of a model.

    Attributes:
        logits: what its head says.
        states: layers of which the states of all tokens are compared.
        first_states: layers of which those of the first tokens are.
        scores: layers of which the attention scores are.
    """

    logits: bool = False
    states: frozenset[int] = frozenset()
    first_states: frozenset[int] = frozenset()
    scores: frozenset[int] = frozenset()

    def __or__(self, other: ActivationSpec) -> ActivationSpec:
        return ActivationSpec(
            self.logits or other.logits,
            self.states | other.states,
            self.first_states | other.first_states,
            self.scores | other.scores,
        )

    @property
    def is_inside(self) -> bool:
        """Whether more is wanted than the head's word."""
        return bool(self.states or self.first_states or self.scores)

    def in_words(self) -> str:
        """The same for every equal wish: part of what a store of answers is known by."""
        layers = {name: sorted(value) for name, value in vars(self).items() if name != "logits"}
        return json.dumps({"logits": self.logits, **layers}, sort_keys=True)


@dataclass(frozen=True)
class Activations:
    """What a model made of a batch.

    Attributes:
        batch: what it read.
        logits_MK: of the head; None where they were not wanted.
        states: (T, D) by layer.
        first_states: (B, D) by layer.
        scores: attention scores before the softmax, (B, N, S, S) by layer, padding cells with anything.
    """

    batch: PackedBatch
    logits_MK: Tensor | None = None
    states: Mapping[int, Tensor] = field(default_factory=dict)
    first_states: Mapping[int, Tensor] = field(default_factory=dict)
    scores: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def lengths_B(self) -> Tensor:
        """Tokens of each sequence."""
        return self.batch.sequences.cu_seqlens_B1.diff().long()

    @property
    def logits(self) -> Tensor:
        """The logits, where they were wanted."""
        assert self.logits_MK is not None, "a term says what it wants"
        return self.logits_MK


@dataclass(frozen=True)
class Shape:
    """What terms must know of a model: layers, width D, heads N of each layer (0 where there are none)."""

    layers: int
    width: int
    heads: int

    @classmethod
    def of(cls, model: HeadedModel) -> Shape:
        """Of a model whose layers can be recorded.

        Raises:
            DataError: they cannot.
        """
        heads = getattr(model.encoder.config, "num_attention_heads", 0)
        return cls(len(layer_points(model)) - 1, model.encoder.width, int(heads))

    @classmethod
    def told_by(cls, config: EncoderConfig) -> Shape:
        """Of a model with these settings, before there is one; 0 layers where the settings do not say how many."""
        with torch.device("meta"):
            width = config.build(_ANY_VOCABULARY).width
        layers, heads = (getattr(config, name, 0) for name in ("num_hidden_layers", "num_attention_heads"))
        return cls(int(layers), width, int(heads))


@dataclass(frozen=True)
class Sizes:
    """Student and teacher."""

    student: Shape
    teacher: Shape

    @classmethod
    def told_by(cls, student: EncoderConfig, teacher: EncoderConfig) -> Sizes:
        """Of models with these settings."""
        return cls(Shape.told_by(student), Shape.told_by(teacher))


class ActivationRecorder:
    """Looks at one model: what to record, and what came of it.

    Args:
        model: any.
        wanted: of it.

    Raises:
        DataError: layers are wanted of a model whose layers cannot be recorded.
    """

    def __init__(self, model: HeadedModel, wanted: ActivationSpec) -> None:
        self.wanted = wanted
        # A model that only speaks may be of any kind.
        self._states = layer_points(model) if wanted.states or wanted.first_states else ()
        points = [self._states[layer] for layer in (*wanted.states, *wanted.first_states)]
        self.points = frozenset([*points, *(_scores(layer) for layer in wanted.scores)])

    def recorder(self) -> Recorder | None:
        """What the forward pass is given; None where nothing is to be recorded."""
        return Recorder(self.points) if self.points else None

    def seen(self, recorder: Recorder | None, batch: PackedBatch, logits_MK: Tensor | None) -> Activations:
        """What was recorded in a pass over all tokens of a batch."""
        kept = {} if recorder is None else recorder.kept
        wanted = self.wanted
        return Activations(
            batch,
            logits_MK if wanted.logits else None,
            {layer: kept[self._states[layer]] for layer in wanted.states},
            {layer: kept[self._states[layer]].index_select(0, batch.first_token_B) for layer in wanted.first_states},
            {layer: kept[_scores(layer)] for layer in wanted.scores},
        )


class Term(Settings, ABC):
    """One term of what a student learns from its teacher."""

    weight: float = Field(1.0, ge=0, description="Factor of this term's mean in the total loss.")

    term: ClassVar[str]
    """Its name in the recipe and in the metrics."""

    @abstractmethod
    def wants(self, sizes: Sizes) -> tuple[ActivationSpec, ActivationSpec]:
        """What it must see of the student, and what of the teacher.

        Raises:
            UsageError: the two do not fit it; the key and the remedy are named.
        """

    @abstractmethod
    def count(self, batch: PackedBatch, rows: int) -> int:
        """How many rows its loss sums.

        Args:
            batch: what both read.
            rows: M of the logits.
        """

    @abstractmethod
    def loss(self, student: Activations, teacher: Activations, sizes: Sizes, maps: LinearMaps) -> LossSum:
        """The summed loss; `correct` counts the rows where both choose the same class, or is 0."""

    def maps(self, sizes: Sizes) -> Mapping[str, tuple[int, int]]:
        """The learnt maps that it needs: input and output width by name."""
        return {}

    def table(self, sizes: Sizes) -> tuple[tuple[int, int], ...]:
        """Which layers it compares, for a reader: (student's, teacher's)."""
        return ()


def summed(rows_M: Tensor, *, agreeing: Tensor | None = None) -> LossSum:
    """The loss of each row as a sum and a count."""
    correct = rows_M.new_zeros((), dtype=torch.int64) if agreeing is None else agreeing.sum()
    return LossSum(rows_M.sum(), rows_M.numel(), correct)


def over_layers(loss_of: Callable[[int, int], Tensor], pairs: tuple[tuple[int, int], ...]) -> LossSum:
    """Rows of every pair of layers, added up row by row: a mean over rows is then a sum over layers."""
    return summed(torch.stack([loss_of(*pair) for pair in pairs]).sum(dim=0))


def wanted_of(terms: Sequence[Term], sizes: Sizes) -> tuple[ActivationSpec, ActivationSpec]:
    """What all terms together must see of the student, and of the teacher.

    Raises:
        UsageError: the two do not fit a term.
    """
    student, teacher = ActivationSpec(), ActivationSpec()
    for term in terms:
        own, theirs = term.wants(sizes)
        student, teacher = student | own, teacher | theirs
    return student, teacher


def give_maps(student: HeadedModel, terms: Sequence[Term], sizes: Sizes, *, seed: int) -> None:
    """Put the maps of all terms beside the student: they train with it, and are never written with it.

    Raises:
        UsageError: student and teacher do not fit a term.
    """
    maps = new_maps(terms, sizes, seed=seed)
    if maps:
        student.companions[MAPS] = maps


def maps_of(student: HeadedModel) -> LinearMaps:
    """The maps of `give_maps`; none where no term needs any."""
    maps = student.companions[MAPS] if MAPS in student.companions else LinearMaps()
    assert isinstance(maps, LinearMaps)
    return maps


def new_maps(terms: Sequence[Term], sizes: Sizes, *, seed: int) -> LinearMaps:
    """The maps of all terms, drawn by the seed like torch's linear layers.

    Raises:
        UsageError: student and teacher do not fit a term.
    """
    wanted: dict[str, tuple[int, int]] = {}
    for term in terms:
        wanted |= term.maps(sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.ModuleDict({name: nn.Linear(*widths) for name, widths in sorted(wanted.items())})


def _scores(layer: int) -> str:
    return _SCORES.format(n=layer - 1)
