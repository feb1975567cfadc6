"""Attention by content, relative distance and segment, for Transformer-XL and XLNet.

Dai et al. 2019, Transformer-XL, arXiv:1901.02860, section 3.3 and appendix B; Yang et al. 2019, XLNet,
arXiv:1906.08237, sections 2.3 to 2.5. Differences from self_attention.py: queries may represent tokens without their
content, keys may come from a memory of earlier tokens, and scores have three parts:

    (q_i + r_w) k_j  +  (q_i + r_r) W R_(i-j)  +  (q_i + r_s) s_(same segment or not)

Shapes: T packed tokens, M queries, D width, N heads, H head width; b sequences of one block, S its longest; K = keys of
a sequence, memory and S; P = distances, K + S; C directions of reading.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import AttentionBlock, PackedSequences
from bertkit.models.attention.rectangles import from_blocks, to_blocks
from bertkit.models.attention.self_attention import is_recorded
from bertkit.models.operators.dropout import dropout
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Scope

_LONGEST_WAVE = 10_000.0


@dataclass(frozen=True)
class PairBlock:
    """The pairs of one block's tokens.

    Attributes:
        block: the rectangle.
        members_b: the numbers of its sequences in the batch.
        other_segment_b1SK: whether key and query are in different segments.
        visible_b1SK: which keys a query attends to; None: all.
    """

    block: AttentionBlock
    members_b: Tensor
    other_segment_b1SK: Tensor
    visible_b1SK: Tensor | None


@dataclass(frozen=True)
class Pairs:
    """The pairs of a batch's tokens, the same for every layer.

    Attributes:
        num_tokens: T.
        sequences: sequences of the batch.
        blocks: one for each block of `sequences`.
        waves_CPD: an embedding of every distance from the farthest key before a token to the farthest after it, for
            each direction of reading if there are two.
        direction_B: the direction of each sequence; None if there is only one direction.
        memory_length: number of keys before the first token.
        biases_NH: r_w and r_r, if all layers share them.
    """

    num_tokens: int
    sequences: PackedSequences
    blocks: tuple[PairBlock, ...]
    waves_CPD: Tensor
    direction_B: Tensor | None
    memory_length: int
    biases_NH: tuple[Tensor, Tensor] | None = None

    def distances(self, relative_CPNH: Tensor, block: PairBlock) -> Tensor:
        """The rows that a block needs from a table of all distances, for each of its sequences or shared by all: (b or
        1, P, N, H)."""
        length = block.block.length
        first = self.sequences.max_length - length
        near_CPNH = relative_CPNH[:, first : first + self.memory_length + 2 * length]
        return near_CPNH if self.direction_B is None else near_CPNH[self.direction_B[block.members_b]]


@dataclass(frozen=True)
class PermutationOrder:
    """The order in which tokens are predicted, as two ranks per token: i attends to j if query_rank[i] > key_rank[j].

    A token visible to all has key rank -1. Both ranks of a target are its place in the order, counted from 0: it
    attends to earlier targets but not to itself. Any other token (a separator that is not predicted) attends to itself,
    with a query rank one above its key rank. The content stream always attends to its own token.

    Attributes:
        key_rank_T, query_rank_T: int64, compared within a sequence.
    """

    key_rank_T: Tensor
    query_rank_T: Tensor


def pair_blocks(
    sequences: PackedSequences,
    token_types_T: Tensor,
    order: PermutationOrder | None,
    *,
    memory_length: int,
    sees_itself: bool,
) -> tuple[PairBlock, ...]:
    """The pairs of each block.

    Args:
        sequences: sequences of the batch.
        token_types_T: segments; the memory is in segment 0.
        order: determines which keys are visible; None: all of the sequence.
        memory_length: number of keys before the first token, visible to all.
        sees_itself: whether a token attends to itself regardless of the order.
    """
    numbers_T = torch.repeat_interleave(sequences.cu_seqlens_B1.diff().long(), output_size=token_types_T.numel())
    rows = [numbers_T, token_types_T]
    if order is not None:
        rows += [order.query_rank_T, order.key_rank_T]
    found = []
    for rows_b1SR, block in zip(to_blocks(torch.stack(rows, dim=1)[:, None], sequences), sequences.blocks, strict=True):
        numbers_b1S, types_b1S, *ranks_b1S = rows_b1SR.unbind(-1)
        key_types_b1K = functional.pad(types_b1S, (memory_length, 0))
        visible = None
        if block.mask_b11S is not None:
            visible = block.mask_b11S & block.mask_b11S.transpose(-1, -2)
        if ranks_b1S:
            in_order_b1SS = ranks_b1S[0][..., :, None] > ranks_b1S[1][..., None, :]
            if sees_itself:
                in_order_b1SS |= torch.eye(block.length, dtype=torch.bool, device=in_order_b1SS.device)
            visible = in_order_b1SS if visible is None else visible & in_order_b1SS
        found.append(
            PairBlock(
                block,
                numbers_b1S[:, 0, 0],
                types_b1S[..., :, None] != key_types_b1K[..., None, :],
                None if visible is None else functional.pad(visible, (memory_length, 0), value=True),
            )
        )
    return tuple(found)


def records_maps(scope: Scope, layers: int, streams: Sequence[str] = ("",)) -> bool:
    """Whether attention maps of any layer are recorded, which requires all sequences in one block.

    Args:
        scope: of the encoder.
        layers: number of layers.
        streams: prefixes of the points within a layer.
    """
    return any(is_recorded(scope.within(f"blocks.{n}.{stream}attn.")) for n in range(layers) for stream in streams)


def require_even_width(width: int, heads: int) -> None:
    """Raise ValueError unless the width can be cut into heads, and into sines and cosines."""
    if width % heads or width % 2:
        raise ValueError(f"hidden_size ({width}) must be even and a multiple of num_attention_heads ({heads})")


def waves(width: int, *, keys: int, queries: int, clamp: int, directions: int, device: torch.device) -> Tensor:
    """Sines, then cosines, of the distances keys, keys - 1, ..., 1 - queries: (C, P, D).

    Args:
        width: D, even.
        keys: K, memory and tokens.
        queries: S.
        clamp: larger distances are clamped to this one; 0 or less: no limit.
        directions: C; 2 for both signs of the distances.
        device: device of the result.
    """
    distance_P = torch.arange(keys, -queries, -1, device=device).float()
    if clamp > 0:
        distance_P = distance_P.clamp(-clamp, clamp)
    frequency = _LONGEST_WAVE ** -(torch.arange(0, width, 2, device=device).float() / width)
    angle = distance_P[:, None] * frequency
    sign_C11 = torch.tensor([1.0, -1.0], device=device)[:directions, None, None]
    return torch.cat([sign_C11 * angle.sin(), angle.cos().expand(directions, -1, -1)], dim=2)


def aligned(scores_bNSP: Tensor, keys: int) -> Tensor:
    """Convert scores by distance to scores by key: (b, N, S, K).

    For query i, key j is at distance K - S + i - j, in column j + S - i. If the first S numbers are dropped and rows
    are one shorter, the same memory has it in row i, column j, so nothing is copied.
    """
    queries, distances = scores_bNSP.shape[-2:]
    shifted = scores_bNSP.flatten(2)[..., queries:]
    return shifted.view(*scores_bNSP.shape[:-1], distances - 1)[..., :keys]


@dataclass(frozen=True)
class Keys:
    """Keys and values of each block, memory first, and the keys of all distances."""

    key_bNKH: list[Tensor]
    value_bNKH: list[Tensor]
    relative_CPNH: Tensor


class DistanceAttention(nn.Module, ABC):
    """Multi-head attention by content and distance; arguments as in `SelfAttention`."""

    position_maps: ClassVar[tuple[str, ...]] = ("relative",)
    products_per_pair: ClassVar[int] = 4
    """As in `SelfAttention`, plus queries with distances, of which there are twice as many as keys."""
    products_per_token: ClassVar[int] = 0

    def __init__(self, width: int, heads: int, *, dropout_rate: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout_rate = dropout_rate
        self.query = Linear(width, width, bias=False)
        self.key = Linear(width, width, bias=False)
        self.value = Linear(width, width, bias=False)
        self.relative = Linear(width, width, bias=False)
        self.output = Linear(width, width, bias=False)

    @abstractmethod
    def biases(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """r_w and r_r, (N, H) each."""

    def keys_per_query(self, length: float) -> float:
        """As in `SelfAttention`."""
        return length

    def keys(self, known_TD: Tensor, pairs: Pairs, memory_BKD: Tensor | None, scope: Scope) -> Keys:
        """Keys and values.

        Args:
            known_TD: the input of keys and values.
            pairs: the keys and their distances.
            memory_BKD: states before each sequence's first token.
            scope: points, each (T, N, H): `hook_k`, `hook_v`.
        """
        key_TNH = scope.tap("hook_k", self._by_heads(self.key(known_TD)))
        value_TNH = scope.tap("hook_v", self._by_heads(self.value(known_TD)))
        key_bNKH = to_blocks(key_TNH, pairs.sequences)
        value_bNKH = to_blocks(value_TNH, pairs.sequences)
        if memory_BKD is not None:
            past_bKD = [memory_BKD[block.members_b] for block in pairs.blocks]
            key_bNKH = self._behind(past_bKD, self.key, key_bNKH)
            value_bNKH = self._behind(past_bKD, self.value, value_bNKH)
        return Keys(key_bNKH, value_bNKH, self._by_heads(self.relative(pairs.waves_CPD)))

    def _behind(self, past_bKD: list[Tensor], projection: nn.Linear, present_bNSH: list[Tensor]) -> list[Tensor]:
        return [
            torch.cat([self._by_heads(projection(past)).transpose(1, 2), present], dim=2)
            for past, present in zip(past_bKD, present_bNSH, strict=True)
        ]

    def forward(
        self, asking_MD: Tensor, keys: Keys, pairs: Pairs, scope: Scope, *, tokens_M: Tensor | None = None
    ) -> Tensor:
        """The output of each query, (M, D), computed from zeros if no key is visible to it.

        Args:
            asking_MD: the input of the queries.
            keys: as returned by `keys`.
            pairs: which of the keys are visible.
            scope: points: `hook_q` and `hook_z`, each (M, N, H); `hook_attn_scores` and `hook_pattern`, each (B, N, S,
                K).
            tokens_M: the token of each query; None: all tokens in order.
        """
        query_TNH = scope.tap("hook_q", self._by_heads(self.query(asking_MD)))
        if tokens_M is not None:
            nobody_TNH = query_TNH.new_zeros(pairs.num_tokens, *query_TNH.shape[1:])
            query_TNH = nobody_TNH.index_copy(0, tokens_M, query_TNH)
        mixed = []
        for number, query in enumerate(to_blocks(query_TNH, pairs.sequences)):
            block = pairs.blocks[number]
            relative_bPNH = pairs.distances(keys.relative_CPNH, block)
            scores_bNSK = self.scores(query, keys.key_bNKH[number], relative_bPNH, block, self.biases(pairs))
            scores_bNSK = scope.tap("hook_attn_scores", scores_bNSK)
            mixed.append(self.gather(scores_bNSK, keys.value_bNKH[number], block, scope))
        mixed_TNH = from_blocks(mixed, pairs.sequences)
        if tokens_M is not None:
            mixed_TNH = mixed_TNH.index_select(0, tokens_M)
        return self.output(scope.tap("hook_z", mixed_TNH).flatten(1))

    def scores(
        self,
        query_bNSH: Tensor,
        key_bNKH: Tensor,
        relative_bPNH: Tensor,
        block: PairBlock,
        biases_NH: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The scaled sum of the parts of the scores, (b, N, S, K)."""
        bias_N1H, relative_bias_N1H = (bias[:, None] for bias in biases_NH)
        by_content = (query_bNSH + bias_N1H) @ key_bNKH.transpose(-1, -2)
        by_distance = (query_bNSH + relative_bias_N1H) @ relative_bPNH.permute(0, 2, 3, 1)
        parts = by_content + aligned(by_distance, key_bNKH.shape[2])
        return self.further_parts(parts, query_bNSH, block) * (1 / math.sqrt(query_bNSH.shape[-1]))

    def further_parts(self, parts_bNSK: Tensor, query_bNSH: Tensor, block: PairBlock) -> Tensor:
        """Add further parts to the scores before they are scaled."""
        return parts_bNSK

    def gather(self, scores_bNSK: Tensor, value_bNKH: Tensor, block: PairBlock, scope: Scope) -> Tensor:
        """Values weighted by the softmax of the scores of visible keys, (b, N, S, H)."""
        if block.visible_b1SK is not None:
            scores_bNSK = scores_bNSK.masked_fill(~block.visible_b1SK, torch.finfo(scores_bNSK.dtype).min)
        pattern_bNSK = torch.softmax(scores_bNSK, dim=-1)
        if block.visible_b1SK is not None:
            # Invisible keys are already zero, except for queries without visible keys, whose softmax is uniform.
            pattern_bNSK = pattern_bNSK * block.visible_b1SK
        pattern_bNSK = scope.tap("hook_pattern", pattern_bNSK)
        return dropout(pattern_bNSK, self.dropout_rate, training=self.training).to(value_bNKH.dtype) @ value_bNKH

    def _by_heads(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:-1], self.heads, -1)


class SharedBiasAttention(DistanceAttention):
    """Transformer-XL's attention: all layers share the biases, those of the pairs."""

    def biases(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        assert pairs.biases_NH is not None, "the encoder gives them"
        return pairs.biases_NH


class RelativeAttention(DistanceAttention):
    """XLNet's attention: also by segment, and with separate biases in each layer."""

    def __init__(self, width: int, heads: int, *, dropout_rate: float) -> None:
        super().__init__(width, heads, dropout_rate=dropout_rate)
        per_head = (heads, width // heads)
        self.r_w_bias = nn.Parameter(torch.zeros(per_head))
        self.r_r_bias = nn.Parameter(torch.zeros(per_head))
        self.r_s_bias = nn.Parameter(torch.zeros(per_head))
        self.seg_embed = nn.Parameter(torch.zeros(2, *per_head))

    def biases(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        return self.r_w_bias, self.r_r_bias

    def further_parts(self, parts_bNSK: Tensor, query_bNSH: Tensor, block: PairBlock) -> Tensor:
        by_segment_bNS2 = (query_bNSH + self.r_s_bias[:, None]) @ self.seg_embed.permute(1, 2, 0)
        by_segment = torch.where(block.other_segment_b1SK, by_segment_bNS2[..., 1:], by_segment_bNS2[..., :1])
        return parts_bNSK + by_segment
