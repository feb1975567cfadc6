"""Encoders whose last layer computes only its attention for all tokens, and everything else for selected ones.

Heads read few tokens, so objectives and tasks declare which (docs/architecture.md). Sibling bert.py has the same for
layers that read nothing but the states, and computes one token per sequence in its attention, too.

Shapes: T packed tokens, D width, M selected tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.encoder import Encoder
from bertkit.models.recorder import Recorder, Scope


class SelectiveEncoder(Encoder):
    """An encoder with one pass for all tokens and for selected ones.

    Attributes:
        layers: the last one has the modules `attention.output` and `feed_forward`.
    """

    layers: nn.ModuleList

    @abstractmethod
    def through(self, batch: PackedBatch, scope: Scope, index_M: Tensor | None = None) -> Tensor:
        """The last layer's states, (T, D), or (M, D) for the tokens `index_M` alone."""

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """(T, D). Points: those of `through`."""
        return self.through(batch, Scope(recorder, ""))

    def forward_tokens(self, batch: PackedBatch, index_M: Tensor) -> Tensor:
        return self.through(batch, Scope(None, ""), index_M)

    def selected_token_modules(self) -> Iterable[nn.Module]:
        last = self.layers[-1]
        return last.get_submodule("attention.output"), last.get_submodule("feed_forward")


class LayeredEncoder(SelectiveEncoder):
    """Embeddings, layers that read states, sequences and further inputs, and a norm if there is one."""

    @abstractmethod
    def embed(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """The input of the first layer, (T, D)."""

    @abstractmethod
    def layer_inputs(self, batch: PackedBatch) -> Sequence[Mapping[str, Any]]:
        """What each layer reads in addition to states and sequences, by name."""

    def through(self, batch: PackedBatch, scope: Scope, index_M: Tensor | None = None) -> Tensor:
        """As in the base class. Points: those of `embed` and `finish`, and those of each layer below `blocks.N.`."""
        hidden_TD, inputs = self.embed(batch, scope), self.layer_inputs(batch)
        last = len(self.layers) - 1
        for number, (own, layer) in enumerate(zip(inputs, self.layers, strict=True)):
            asked_M = index_M if number == last else None
            hidden_TD = layer(hidden_TD, batch.sequences, scope.within(f"blocks.{number}."), asked_M, **own)
        return self.finish(hidden_TD, scope)
