"""Encoders whose last layer computes only its attention for all tokens, and everything else for selected ones.

Heads read few tokens, so objectives and tasks declare which (docs/architecture.md). For a head that reads one token per
sequence, plain attention computes only this one, too.

Shapes: T packed tokens, D width, M selected tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.encoder import Encoder
from bertkit.models.layers import PostNormLayer, PreNormLayer
from bertkit.models.operators.dropout import Dropout
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
    """Embeddings, dropout, layers that read states, sequences and further inputs, and a norm if there is one."""

    embeddings: nn.Module
    dropout: Dropout
    selective_layers: ClassVar[tuple[type[nn.Module], ...]] = (PostNormLayer, PreNormLayer)
    """The layers that can compute only selected tokens behind their attention; others compute all."""

    def embed(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """The input of the first layer, (T, D)."""
        return self.dropout(self.embeddings(batch, scope))

    def layer_inputs(self, batch: PackedBatch) -> Sequence[Mapping[str, Any]]:
        """What each layer reads in addition to states and sequences, by name."""
        return [{}] * len(self.layers)

    def through(self, batch: PackedBatch, scope: Scope, index_M: Tensor | None = None) -> Tensor:
        """As in the base class. Points: those of `embed` and `finish`, and those of each layer below `blocks.N.`."""
        return self.finish(self._through(len(self.layers), batch, scope, index_M), scope)

    def forward_summary_token(self, batch: PackedBatch, token_B: Tensor, recorder: Recorder | None = None) -> Tensor:
        """As in `Encoder`; the last layer computes keys and values of all tokens, everything else only for these."""
        last = self.summary_token_layer
        # A recorded layer, and a recorded norm after it, compute all tokens.
        ends = (f"blocks.{len(self.layers) - 1}.", "ln_final.")
        seen = recorder is not None and any(map(recorder.needs_within, ends))
        if last is None or seen or batch.sequences.causal_B is not None:
            return super().forward_summary_token(batch, token_B, recorder)
        scope = Scope(recorder, "")
        hidden_TD = self._through(len(self.layers) - 1, batch, scope)
        return self.finish(last.forward_summary_token(hidden_TD, batch.sequences, token_B), scope)

    @property
    def summary_token_layer(self) -> PostNormLayer | PreNormLayer | None:
        last = self._last
        # Other kinds of attention compute all tokens.
        if isinstance(last, PostNormLayer | PreNormLayer) and type(last.attention) is SelfAttention:
            return last
        return None

    def forward_tokens(self, batch: PackedBatch, index_M: Tensor) -> Tensor:
        if self._last is None:
            return Encoder.forward_tokens(self, batch, index_M)
        return super().forward_tokens(batch, index_M)

    def selected_token_modules(self) -> Iterable[nn.Module]:
        return () if self._last is None else super().selected_token_modules()

    @property
    def _last(self) -> nn.Module | None:
        """The last layer, if it can compute only selected tokens."""
        last = self.layers[-1] if len(self.layers) else None
        return last if isinstance(last, self.selective_layers) else None

    def _through(self, layers: int, batch: PackedBatch, scope: Scope, index_M: Tensor | None = None) -> Tensor:
        """The states after this many layers, (T, D), or (M, D) for the tokens `index_M` alone."""
        hidden_TD, inputs = self.embed(batch, scope), self.layer_inputs(batch)
        for number, (own, layer) in enumerate(zip(inputs[:layers], self.layers[:layers], strict=True)):
            selected = () if index_M is None or number < layers - 1 else (index_M,)
            hidden_TD = layer(hidden_TD, batch.sequences, scope.within(f"blocks.{number}."), *selected, **own)
        return hidden_TD
