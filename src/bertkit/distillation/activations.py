"""What a distillation term reads from a model: its logits, the hidden states after its layers, its attention scores.

Not from a paper. A recorder is passed to the forward pass, so a teacher and a student of different families can be
compared. Layers are counted from 1; 0 is the embeddings.

Shapes: T packed tokens, B sequences, M rows of logits (examples of a task, or tokens of a text), K classes, D width,
N heads, S longest sequence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.models.conversion.pruning import HeadChoice, pruned_heads
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel, summarised_token
from bertkit.models.hook_points import layer_points
from bertkit.models.operators.vocabulary import WordLogits
from bertkit.models.recorder import Recorder

_SCORES, _PATTERN = "blocks.{n}.attn.hook_attn_scores", "blocks.{n}.attn.hook_pattern"
SMALL_VOCABULARY = 7
"""Words of a model that is built without weights, for its shape only."""


@dataclass(frozen=True)
class ActivationSpec:
    """What is recorded from a model.

    Attributes:
        logits: whether the output of its head is recorded.
        states: layers whose states are compared for all tokens.
        summary_states: layers whose states are compared for the token of each sequence that classifiers read.
        scores: layers whose attention scores are compared.
    """

    logits: bool = False
    states: frozenset[int] = frozenset()
    summary_states: frozenset[int] = frozenset()
    scores: frozenset[int] = frozenset()

    def __or__(self, other: ActivationSpec) -> ActivationSpec:
        return ActivationSpec(
            *(own | more for own, more in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    @property
    def has_layers(self) -> bool:
        """Whether anything besides the logits is recorded."""
        return bool(self.states or self.summary_states or self.scores)

    def to_json(self) -> str:
        """Equal for equal specs; part of a teacher cache's identity."""
        return json.dumps(vars(self), default=sorted, sort_keys=True)


class AttentionMap(NamedTuple):
    """A layer's attention.

    Attributes:
        scores_BNSS: before the softmax; cells of padding and of pairs that do not attend have arbitrary values.
        seen_BSS: bool; which keys a query attends to, none of them padding.
    """

    scores_BNSS: Tensor
    seen_BSS: Tensor


@dataclass(frozen=True)
class Activations:
    """What was recorded from a model on one batch.

    Attributes:
        batch: the model's input.
        logits: output of the head: (M, K) on a task; on text, rows that are computed a few at a time. None if not
            recorded.
        states: (T, D) by layer.
        summary_states: (B, D) by layer.
        maps: attention by layer.
    """

    batch: PackedBatch
    logits: Tensor | WordLogits | None = None
    states: Mapping[int, Tensor] = field(default_factory=dict)
    summary_states: Mapping[int, Tensor] = field(default_factory=dict)
    maps: Mapping[int, AttentionMap] = field(default_factory=dict)

    @property
    def lengths_B(self) -> Tensor:
        """Number of tokens in each sequence."""
        return self.batch.sequences.cu_seqlens_B1.diff().long()

    @property
    def logits_MK(self) -> Tensor:
        """The logits of a task's head."""
        assert isinstance(self.logits, Tensor), "task logits are computed all at once"
        return self.logits


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that terms depend on: layers, width D, heads N of each layer (0 if there are none).

    `pruned` has the number of pruned heads by layer, without unpruned layers.
    """

    layers: int
    width: int
    heads: int
    pruned: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: HeadedModel) -> ModelShape:
        """The shape of a model whose layers can be recorded.

        Raises:
            DataError: the layers cannot be recorded.
        """
        heads = getattr(model.encoder.config, "num_attention_heads", 0)
        return cls(len(layer_points(model)) - 1, model.encoder.width, int(heads), _counted(pruned_heads(model.encoder)))

    @classmethod
    def from_config(cls, config: EncoderConfig, pruned: HeadChoice = MappingProxyType({})) -> ModelShape:
        """The shape of a model with these settings and pruned heads; 0 layers if the settings do not give their
        number."""
        with torch.device("meta"):
            width = config.build(SMALL_VOCABULARY).width
        layers, heads = (getattr(config, name, 0) for name in ("num_hidden_layers", "num_attention_heads"))
        return cls(int(layers), width, int(heads), _counted(pruned))

    def heads_in(self, layer: int) -> int:
        """The heads of one layer that were not pruned."""
        return self.heads - self.pruned.get(layer, 0)


def _counted(pruned: HeadChoice) -> dict[int, int]:
    """The number of pruned heads by layer; here layers are counted from 1."""
    return {number + 1: len(gone) for number, gone in pruned.items() if gone}


class ActivationRecorder:
    """Records one model's passes according to a spec.

    Args:
        model: any model.
        spec: what is recorded from it.

    Raises:
        DataError: the spec has layers, but those of the model cannot be recorded.
    """

    def __init__(self, model: HeadedModel, spec: ActivationSpec) -> None:
        self.spec = spec
        # If only logits are recorded, any kind of model will do.
        self._states = layer_points(model) if spec.states or spec.summary_states else ()
        points = [self._states[layer] for layer in (*spec.states, *spec.summary_states)]
        maps = [_point(name, layer) for name in (_SCORES, _PATTERN) for layer in spec.scores]
        self.points = frozenset([*points, *maps])
        self._summary = summary_of(model)

    def recorder(self) -> Recorder | None:
        """The recorder for the forward pass; None if only logits are recorded."""
        return Recorder(self.points) if self.points else None

    def activations(
        self, recorder: Recorder | None, batch: PackedBatch, logits: Tensor | WordLogits | None = None
    ) -> Activations:
        """What was recorded during a pass over all tokens of a batch."""
        kept = {} if recorder is None else recorder.kept
        spec, summary_B = self.spec, summarised_token(self._summary, batch)
        return Activations(
            batch,
            logits if spec.logits else None,
            {layer: kept[self._states[layer]] for layer in spec.states},
            {layer: kept[self._states[layer]].index_select(0, summary_B) for layer in spec.summary_states},
            {
                layer: AttentionMap(kept[_point(_SCORES, layer)], (kept[_point(_PATTERN, layer)] > 0).any(dim=1))
                for layer in spec.scores
            },
        )


def summary_of(model: HeadedModel) -> Literal["first", "last"]:
    """Which token of a sequence the family's classifiers read: [CLS] is last in XLNet, and GPT has only the last one
    that has seen the whole text. The first if they read a mean."""
    plan = model.plans.get("sequence_classification")
    return "last" if plan is not None and plan.summary == "last" else "first"


def _point(name: str, layer: int) -> str:
    return name.format(n=layer - 1)
