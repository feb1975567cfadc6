"""Cache of the keys and values of earlier tokens: each step computes only the next token.

Vaswani et al. 2017, arXiv:1706.03762, section 3.2: under a causal mask a token's keys and values do not depend on later
tokens. The cache replaces a batch's `PackedSequences`, which only attention reads, so layers run unchanged.
decoding/causal.py runs a model with it.

Shapes: T packed tokens, R rows (sequences that grow), N heads, H head width, S tokens that a row has room for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from bertkit.data.batch import AttentionBlock, PackedSequences
from bertkit.models.attention.distance_bias import BucketBias


class KeyValueCache:
    """Keys and values of R rows, for all layers in the order in which a forward pass calls them.

    Args:
        lengths: number of tokens in each row's prompt.
        room: S, the maximum number of tokens in a row.
        device: the model's device.

    Attributes:
        lengths_R: current number of tokens in each row.
    """

    def __init__(self, lengths: list[int], room: int, device: torch.device) -> None:
        self.lengths_R = torch.tensor(lengths, dtype=torch.int64, device=device)
        self.room = room
        self._longest = max(lengths)
        self._are_equal = min(lengths) == self._longest
        self._keys_RNSH: list[Tensor] = []
        self._values_RNSH: list[Tensor] = []
        self._layer = 0
        self._mask: dict[int | None, Tensor | None] = {}

    def keep(self, key_TNH: Tensor, value_TNH: Tensor) -> None:
        """Store one layer's keys and values of all prompts, which are packed end to end."""
        row_T, place_T = rows_and_places(self.lengths_R, key_TNH.shape[0])
        for kept, part_TNH in ((self._keys_RNSH, key_TNH), (self._values_RNSH, value_TNH)):
            room_RNSH = part_TNH.new_empty(self.lengths_R.numel(), part_TNH.shape[1], self.room, part_TNH.shape[2])
            # Places after a row's last token are masked, but must be finite.
            room_RNSH[:, :, : self._longest].zero_()
            room_RNSH[row_T, :, place_T] = part_TNH
            kept.append(room_RNSH)

    def begin_step(self) -> None:
        """Make room for one more token in every row."""
        self._layer = 0
        self._mask = {}

    def end_step(self) -> None:
        """Count the new token of every row, now stored in all layers."""
        self.lengths_R = self.lengths_R + 1
        self._longest += 1

    def attend(
        self,
        query_RNH: Tensor,
        key_RNH: Tensor,
        value_RNH: Tensor,
        *,
        scale: float | None,
        each_side: int | None,
        bias: BucketBias | None = None,
    ) -> Tensor:
        """Store the new tokens' keys and values in the next layer; each token attends to its row: (R, N, H).

        Args:
            scale: factor of the scores; None: one over the square root of the head width.
            each_side: how far back a token attends; None: to the first token.
            bias: added to the scaled scores.
        """
        keys_RNSH, values_RNSH = self._keys_RNSH[self._layer], self._values_RNSH[self._layer]
        self._layer += 1
        end = self._longest + 1
        if self._are_equal:
            keys_RNSH[:, :, self._longest] = key_RNH
            values_RNSH[:, :, self._longest] = value_RNH
        else:
            keys_RNSH[:, :, self._longest].zero_()
            values_RNSH[:, :, self._longest].zero_()
            row_R = torch.arange(self.lengths_R.numel(), device=key_RNH.device)
            keys_RNSH[row_R, :, self.lengths_R] = key_RNH
            values_RNSH[row_R, :, self.lengths_R] = value_RNH
        if each_side not in self._mask:
            self._mask[each_side] = self._visible(end, each_side)
        mask = self._mask[each_side]
        if bias is not None:
            bias_RN1S = bias.of_next(self.lengths_R, end).to(query_RNH.dtype)
            mask = bias_RN1S if mask is None else bias_RN1S.masked_fill(~mask, -math.inf)
        mixed_RN1H = functional.scaled_dot_product_attention(
            query_RNH[:, :, None],
            keys_RNSH[:, :, :end],
            values_RNSH[:, :, :end],
            attn_mask=mask,
            scale=scale,
        )
        return mixed_RN1H[:, :, 0]

    def select(self, row_R: Tensor) -> None:
        """Continue with these rows, in this order; a row may be repeated."""
        rows = self.lengths_R.numel()
        self.lengths_R = self.lengths_R[row_R]
        unchanged = row_R.numel() == rows and bool((row_R == torch.arange(rows, device=row_R.device)).all())
        if unchanged:
            return
        end = self._longest
        for kept in (self._keys_RNSH, self._values_RNSH):
            for layer, old_RNSH in enumerate(kept):
                chosen_RNSH = old_RNSH[:, :, :end].index_select(0, row_R)
                if row_R.numel() > rows:
                    old_RNSH = old_RNSH.new_empty(row_R.numel(), *old_RNSH.shape[1:])
                kept[layer] = old_RNSH[: row_R.numel()]
                kept[layer][:, :, :end] = chosen_RNSH
        lengths = self.lengths_R.tolist()
        self._longest = max(lengths)
        self._are_equal = min(lengths) == self._longest

    def _visible(self, end: int, each_side: int | None) -> Tensor | None:
        """Which of the first `end` places each row's new token attends to, (R, 1, 1, S); None: all."""
        if self._are_equal and (each_side is None or each_side >= end - 1):
            return None
        place_S = torch.arange(end, device=self.lengths_R.device)
        visible_RS = place_S <= self.lengths_R[:, None]
        if each_side is not None:
            visible_RS &= place_S >= self.lengths_R[:, None] - each_side
        return visible_RS[:, None, None]


def rows_and_places(lengths_R: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The row of each of the tokens of all rows, packed end to end, and its place in the row, both (T,)."""
    row_T = torch.repeat_interleave(lengths_R, output_size=tokens)
    return row_T, torch.arange(tokens, device=lengths_R.device) - (lengths_R.cumsum(0) - lengths_R)[row_T]


@dataclass(frozen=True)
class CachedSequences(PackedSequences):
    """Sequences with cached keys and values: prompts, which attention reads as usual, or the next token of each.

    Attributes:
        cache: contains their keys and values.
        is_prompt: whether these are the prompts.
    """

    cache: KeyValueCache = field(kw_only=True)
    is_prompt: bool = field(kw_only=True)

    @classmethod
    def prompts(cls, sequences: PackedSequences, cache: KeyValueCache) -> CachedSequences:
        """The prompts, each read from left to right."""
        return cls(**vars(sequences.as_causal()), cache=cache, is_prompt=True)

    @classmethod
    def next_tokens(cls, cache: KeyValueCache) -> CachedSequences:
        """One more token of every row."""
        rows = cache.lengths_R.numel()
        bounds_R1 = torch.arange(rows + 1, dtype=torch.int32, device=cache.lengths_R.device)
        return cls(bounds_R1, 1, (AttentionBlock(rows, 1, None),), None, None, cache=cache, is_prompt=False)


def through_cache(
    query_TNH: Tensor,
    key_TNH: Tensor,
    value_TNH: Tensor,
    sequences: PackedSequences,
    *,
    scale: float | None = None,
    each_side: int | None = None,
    bias: BucketBias | None = None,
) -> Tensor | None:
    """Attention output for the next tokens of cached rows, (T, N, H); None if it must be computed as usual.

    Also stores the keys and values of prompts.
    """
    if not isinstance(sequences, CachedSequences):
        return None
    if sequences.is_prompt:
        sequences.cache.keep(key_TNH, value_TNH)
        return None
    return sequences.cache.attend(query_TNH, key_TNH, value_TNH, scale=scale, each_side=each_side, bias=bias)
