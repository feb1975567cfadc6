"""A learnt bias on attention scores for each bucket of relative distances, shared by all layers of a stack.

Raffel et al. 2020, T5, arXiv:1910.10683, section 2.1; buckets as in mesh-tensorflow. Half of the buckets of
a direction cover one distance each, the rest grow logarithmically, and the last one covers all farther distances.

Shapes: T packed tokens, b sequences of one block, S its longest, N heads, R rows being generated, K keys of a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bertkit.data.batch import AttentionBlock, PackedSequences
from bertkit.models.attention.rectangles import to_blocks


def distance_buckets(distance: Tensor, *, buckets: int, furthest: int, both_sides: bool) -> Tensor:
    """The bucket of each distance, int64 in [0, buckets).

    Args:
        distance: position of the key minus that of the query, in tokens.
        buckets: number of buckets.
        furthest: distances from here on share the last bucket of their direction.
        both_sides: whether keys after the query have half of the buckets; if not, they count as distance 0.
    """
    after: int | Tensor = 0
    if both_sides:
        buckets //= 2
        after = (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    # Single precision and this order of operations determine on which side of a boundary a distance falls.
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(furthest / exact)
    coarse = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, coarse) + after


class BucketBias:
    """The bias of one forward pass, computed once per length for all layers.

    Args:
        table: (buckets or more, N).
        buckets, furthest, both_sides: as in `distance_buckets`.
    """

    def __init__(self, table: nn.Embedding, *, buckets: int, furthest: int, both_sides: bool) -> None:
        self._table = table
        self._buckets, self._furthest, self._both_sides = buckets, furthest, both_sides
        self._of_length: dict[str, Tensor] = {}
        self._of_next: Tensor | None = None

    def __call__(self, query_bNSH: Tensor, key_bNSH: Tensor, block: AttentionBlock) -> Tensor:
        """As a `Bias` of self_attention.py, (1, N, S, S)."""
        length = str(block.length)  # an exported graph's symbol cannot be a key
        if length not in self._of_length:
            position_S = torch.arange(block.length, device=query_bNSH.device)
            values_SSN = self.values(position_S[None, :] - position_S[:, None])
            self._of_length[length] = values_SSN.permute(2, 0, 1)[None]
        return self._of_length[length].to(query_bNSH.dtype)

    def of_next(self, position_R: Tensor, keys: int) -> Tensor:
        """The bias of the next token of each row, (R, N, 1, K), given its position; a row's keys are at 0, 1, ..."""
        if self._of_next is None:
            place_K = torch.arange(keys, device=position_R.device)
            values_RKN = self.values(place_K[None, :] - position_R[:, None])
            self._of_next = values_RKN.permute(0, 2, 1)[:, :, None]
        return self._of_next

    def values(self, distance: Tensor) -> Tensor:
        """The bias of each distance for every head: one dimension more, N."""
        buckets = distance_buckets(
            distance, buckets=self._buckets, furthest=self._furthest, both_sides=self._both_sides
        )
        values: Tensor = self._table(buckets)
        return values


class OrderedBias:
    """A `BucketBias` for sequences with an order: distances are those in the text, and a token that is not attended to
    has a bias of minus infinity. Computed once per block for all layers.

    Args:
        bias: of the distances.
        sequences: of the batch.
        order_T4: as in `bertkit.data.samples.Samples`.
    """

    def __init__(self, bias: BucketBias, sequences: PackedSequences, order_T4: Tensor) -> None:
        self._bias = bias
        self._sequences = sequences
        self._order_T4 = order_T4
        self._of_block: dict[int, Tensor] = {}

    def __call__(self, query_bNSH: Tensor, key_bNSH: Tensor, block: AttentionBlock) -> Tensor:
        """As a `Bias` of self_attention.py, (b, N, S, S)."""
        number = next((n for n, each in enumerate(self._sequences.blocks) if each is block), -1)
        if number not in self._of_block:
            # A block of none of the sequences: recorded attention has all of them in one.
            sequences = self._sequences if number >= 0 else self._sequences.as_one_block()
            self._of_block[number] = self._values(to_blocks(self._order_T4[:, None], sequences)[max(number, 0)])
        return self._of_block[number].to(query_bNSH.dtype)

    def _values(self, order_b1S4: Tensor) -> Tensor:
        position_b1S, rank_b1S, first_b1S, end_b1S = order_b1S4.unbind(-1)
        distance_bSS = (position_b1S[..., None, :] - position_b1S[..., None]).squeeze(1)
        rank_b1S1 = rank_b1S[..., None]
        seen_b1SS = (rank_b1S1 >= first_b1S[..., None, :]) & (rank_b1S1 < end_b1S[..., None, :])
        values_bNSS = self._bias.values(distance_bSS).permute(0, 3, 1, 2)
        return torch.where(seen_b1SS, values_bNSS, -math.inf).contiguous()
