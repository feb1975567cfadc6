"""Attention of a decoder to an encoder's states: for packed sequences, or for rows generated token by token.

Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3. Queries come from the target's tokens, keys and values from the
same sequence's source. Both sides are grouped into blocks with the same members (`SourceTarget`). As in self-attention
(sibling self_attention.py), a sequence's states therefore depend only on itself.

Shapes: U packed target tokens, S packed source tokens, D width, N heads, H head width; b sequences of one block, Q its
longest target, K its longest source; R rows being generated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import SourceTarget
from bertkit.models.attention.key_value_cache import rows_and_places
from bertkit.models.attention.rectangles import from_blocks, to_blocks
from bertkit.models.attention.self_attention import attend_block, is_recorded
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Scope


class CrossAttention(nn.Module):
    """Multi-head attention from target to source, with an output projection.

    Args:
        width: D of both sides.
        heads: N.
        dropout_rate: of the attention probabilities.
        head_width: H; None: D over N.
        bias: whether the linear maps have one.
        scale: factor of the scores; None: one over the square root of H.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        dropout_rate: float,
        head_width: int | None = None,
        bias: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        inner = width if head_width is None else heads * head_width
        self.heads = heads
        self.dropout_rate = dropout_rate
        self.scale = scale
        self.query = Linear(width, inner, bias=bias)
        self.key = Linear(width, inner, bias=bias)
        self.value = Linear(width, inner, bias=bias)
        self.output = Linear(inner, width, bias=bias)

    def forward(self, hidden_UD: Tensor, source: EncodedSource, layer: int, scope: Scope) -> Tensor:
        """(U, D) to (U, D). Points: `hook_q` and `hook_z`, (U, N, H); if the source is packed, `hook_k` and `hook_v`,
        (S, N, H), `hook_attn_scores` and `hook_pattern`."""
        query_UNH = scope.tap("hook_q", self.query(hidden_UD).view(hidden_UD.shape[0], self.heads, -1))
        mixed_UNH = scope.tap("hook_z", source.attend(self, layer, query_UNH, scope))
        return self.output(mixed_UNH.flatten(1))

    def keys_values(self, states_SD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the source's states, each (S, N, H)."""
        shape = (states_SD.shape[0], self.heads, -1)
        return self.key(states_SD).view(shape), self.value(states_SD).view(shape)


class EncodedSource(ABC):
    """The encoder's states, in the form that a decoder's layers attend to."""

    @abstractmethod
    def attend(self, attention: CrossAttention, layer: int, query_UNH: Tensor, scope: Scope) -> Tensor:
        """One layer's attention output for each query, (U, N, H).

        Args:
            attention: has the maps that compute keys and values.
            layer: its number in the decoder.
            query_UNH: of the target's tokens.
            scope: of the attention.
        """


class PackedSource(EncodedSource):
    """The states of whole sequences; their targets are packed in the same order.

    Args:
        states_SD: the encoder's states.
        pairs: the bounds of both sides.
    """

    def __init__(self, states_SD: Tensor, pairs: SourceTarget) -> None:
        self.states_SD = states_SD
        self.pairs = pairs

    def attend(self, attention: CrossAttention, layer: int, query_UNH: Tensor, scope: Scope) -> Tensor:
        key_SNH, value_SNH = attention.keys_values(self.states_SD)
        key_SNH, value_SNH = scope.tap("hook_k", key_SNH), scope.tap("hook_v", value_SNH)
        queries, keys = self.pairs.queries, self.pairs.keys
        if is_recorded(scope):
            queries, keys = queries.as_one_masked_block(), keys.as_one_masked_block()
        rate = attention.dropout_rate if attention.training else 0.0
        parts = (to_blocks(query_UNH, queries), to_blocks(key_SNH, keys), to_blocks(value_SNH, keys))
        mixed = [
            attend_block(
                query, key, value, asked.mask_b11S, asking, dropout_rate=rate, scope=scope, scale=attention.scale
            )
            for query, key, value, asking, asked in zip(*parts, queries.blocks, keys.blocks, strict=True)
        ]
        return from_blocks(mixed, queries)


class CachedSource(EncodedSource):
    """Keys and values of R rows in all layers, computed once, for targets of one token per row.

    Args:
        attentions: of the decoder's layers, in order.
        states_SD: the encoder's states.
        lengths: number of tokens in each row's source.
    """

    def __init__(self, attentions: Sequence[CrossAttention], states_SD: Tensor, lengths: Sequence[int]) -> None:
        length_R = torch.tensor(lengths, device=states_SD.device)
        longest = max(lengths)
        row_S, place_S = rows_and_places(length_R, states_SD.shape[0])
        self._layers: list[tuple[Tensor, Tensor]] = []
        for attention in attentions:
            both = []
            for part_SNH in attention.keys_values(states_SD):
                room_RNKH = part_SNH.new_zeros(len(lengths), part_SNH.shape[1], longest, part_SNH.shape[2])
                room_RNKH[row_S, :, place_S] = part_SNH
                both.append(room_RNKH)
            self._layers.append((both[0], both[1]))
        visible_RK = torch.arange(longest, device=states_SD.device) < length_R[:, None]
        self._mask: Tensor | None = None if min(lengths) == longest else visible_RK[:, None, None]

    def select(self, row_R: Tensor) -> None:
        """Continue with these rows, in this order; a row may be repeated."""
        rows = self._layers[0][0].shape[0] if self._layers else 0
        if row_R.numel() == rows and bool((row_R == torch.arange(rows, device=row_R.device)).all()):
            return
        self._layers = [(key.index_select(0, row_R), value.index_select(0, row_R)) for key, value in self._layers]
        self._mask = None if self._mask is None else self._mask.index_select(0, row_R)

    def attend(self, attention: CrossAttention, layer: int, query_UNH: Tensor, scope: Scope) -> Tensor:
        keys_RNKH, values_RNKH = self._layers[layer]
        mixed_RN1H = functional.scaled_dot_product_attention(
            query_UNH[:, :, None], keys_RNKH, values_RNKH, attn_mask=self._mask, scale=attention.scale
        )
        return mixed_RN1H[:, :, 0]
