"""Block-sparse attention, in time and memory linear in the length.

Zaheer et al. 2020, BigBird, arXiv:2007.14062, section 2 and appendix D. A sequence is divided into blocks of
tokens. The first and the last block attend to all blocks, and all attend to them. Every other block attends to these
two, to itself and its two neighbours, and to a few blocks drawn at random for each head. The draws depend only on the
layer and the number of blocks: as in the released code, they are the same in training and evaluation, for any other
sequences in the batch. Sequences so short that hardly any block would be left out use full attention.

Shapes: T packed tokens, N heads, H head width; b sequences of one block of the batch, S its longest; C blocks of w
tokens of a sequence, K slots: the blocks that one of them attends to, -1 for an unused slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bertkit.arrays import Int64Array
from bertkit.data.batch import AttentionBlock, PackedSequences
from bertkit.models.attention.rectangles import from_blocks, in_blocks
from bertkit.models.attention.self_attention import attend_block, fused_attention, is_recorded
from bertkit.models.operators.eager import exclude_from_compile
from bertkit.models.recorder import Scope

_ALWAYS = 5
"""The first and the last block, the block itself and its neighbours."""


@dataclass(frozen=True)
class BlockPattern:
    """Which blocks of a layer attend to which.

    Attributes:
        size: w, tokens per block.
        random: number of random blocks that each block attends to.
        heads: N.
        layer: the layer's number, on which the draws depend.
    """

    size: int
    random: int
    heads: int
    layer: int

    @property
    def whole_blocks(self) -> int:
        """Sequences of up to this many blocks use full attention, as in the released code."""
        return _ALWAYS + 2 * self.random

    def keys_per_query(self, length: float) -> float:
        """Keys per query in a sequence of this many tokens, averaged over the queries."""
        if length <= self.whole_blocks * self.size:
            return length
        share_of_global = 2 * self.size / length
        return share_of_global * length + (1 - share_of_global) * (_ALWAYS + self.random) * self.size

    def slots(self, blocks: int) -> Int64Array:
        """The blocks that each block attends to, (N, C, K), in a sequence of this many blocks. Blocks that attend to
        all have no slots, unless the sequence is short enough for full attention."""
        if blocks <= self.whole_blocks:
            return np.broadcast_to(np.arange(blocks), (self.heads, blocks, blocks))
        middle = np.arange(1, blocks - 1)
        near = np.stack(
            [np.zeros_like(middle), middle - 1, middle, middle + 1, np.full_like(middle, blocks - 1)], axis=1
        )
        # The second block's neighbour is the first block, to which all attend; likewise at the end.
        near[0, 1] = near[-1, 3] = -1
        drawn = _drawn_blocks(self.layer, self.heads, blocks, self.random)
        chosen = np.full((self.heads, blocks, _ALWAYS + self.random), -1)
        chosen[:, 1:-1, :_ALWAYS] = near
        chosen[:, 1:-1, _ALWAYS:] = drawn
        return chosen


@lru_cache(maxsize=256)
def _drawn_blocks(layer: int, heads: int, blocks: int, number: int) -> Int64Array:
    """The random blocks of each block except the first and the last, (N, C - 2, number): never these two, itself or
    its neighbours, and none twice."""
    generator = np.random.Generator(np.random.Philox(key=[layer, blocks]))
    drawn = generator.random((heads, blocks - 2, blocks))
    middle, every = np.arange(1, blocks - 1)[:, None], np.arange(blocks)
    seen_anyway = (abs(middle - every) <= 1) | (every == 0) | (every == blocks - 1)
    found: Int64Array = np.where(seen_anyway, 2.0, drawn).argsort(axis=-1, kind="stable")[..., :number]
    return found


@exclude_from_compile
def attend_blocks(
    query_TNH: Tensor,
    key_TNH: Tensor,
    value_TNH: Tensor,
    sequences: PackedSequences,
    pattern: BlockPattern,
    *,
    scope: Scope,
) -> Tensor:
    """Every token attends to the tokens of the blocks that its own block attends to; returns (T, N, H).

    Args:
        pattern: the layer's pattern.
        scope: points `hook_attn_scores` and `hook_pattern`, as in `attend`; if recorded, all scores are computed.
    """
    recorded = is_recorded(scope)
    if recorded:
        sequences = sequences.as_one_block()
    mixed = []
    for query, key, value, block in in_blocks(query_TNH, key_TNH, value_TNH, sequences):
        if recorded or block.length <= pattern.whole_blocks * pattern.size:
            mask = visible_tokens(block, pattern, query.device)
            mixed.append(attend_block(query, key, value, mask, block, scope=scope))
        else:
            mixed.append(_by_slots(query, key, value, block, pattern))
    return from_blocks(mixed, sequences)


def visible_tokens(block: AttentionBlock, pattern: BlockPattern, device: torch.device) -> Tensor | None:
    """Which keys each query attends to, (b, N, S, S) or broadcastable to it; None: all. Padding attends to itself,
    since a softmax over no keys is undefined."""
    if block.length <= pattern.whole_blocks * pattern.size:
        return block.mask_b11S
    lengths_b = _lengths(block)
    seen = np.zeros((block.sequences, pattern.heads, block.length, block.length), dtype=bool)
    for number, length in enumerate(lengths_b):
        blocks = -(-length // pattern.size)
        slots_NCK = pattern.slots(blocks)
        seen_NCC = (slots_NCK[..., None] == np.arange(blocks)).any(axis=2)
        if blocks > pattern.whole_blocks:
            seen_NCC[:, [0, -1]] = True
        by_token = seen_NCC.repeat(pattern.size, axis=1).repeat(pattern.size, axis=2)
        seen[number, :, :length, :length] = by_token[:, :length, :length]
    padding = np.arange(block.length) >= np.array(lengths_b)[:, None]
    seen |= (np.eye(block.length, dtype=bool) & padding[:, None])[:, None]
    return torch.from_numpy(seen).to(device)


def _lengths(block: AttentionBlock) -> list[int]:
    """Number of tokens of each sequence."""
    if block.mask_b11S is None:
        return [block.length] * block.sequences
    lengths_b: list[int] = block.mask_b11S[:, 0, 0].sum(dim=1).tolist()
    return lengths_b


def _by_slots(
    query_bNSH: Tensor, key_bNSH: Tensor, value_bNSH: Tensor, block: AttentionBlock, pattern: BlockPattern
) -> Tensor:
    """Gather the keys of each block's slots; blocks that attend to all are computed separately and put in place."""
    size, device = pattern.size, query_bNSH.device
    lengths_b = _lengths(block)
    blocks_b = [-(-length // size) for length in lengths_b]
    most = -(-block.length // size)  # more than the longest sequence needs if lengths are rounded up
    missing = most * size - block.length

    def cut(rows_bNSH: Tensor) -> Tensor:
        """(b, N, C, w, H)."""
        return functional.pad(rows_bNSH, (0, 0, 0, missing)).view(*rows_bNSH.shape[:2], most, size, rows_bNSH.shape[3])

    query, key, value = cut(query_bNSH), cut(key_bNSH), cut(value_bNSH)
    slots_bNCK = _slots(blocks_b, most, pattern, device)
    real_bCw = torch.arange(most * size, device=device).view(most, size) < torch.tensor(lengths_b, device=device).view(
        -1, 1, 1
    )
    sequence = torch.arange(block.sequences, device=device).view(-1, 1, 1, 1)
    head = torch.arange(pattern.heads, device=device).view(1, -1, 1, 1)
    index_bNCK = slots_bNCK.clamp(min=0)
    seen = real_bCw[sequence, index_bNCK] & (slots_bNCK >= 0)[..., None]

    def as_batch(rows: Tensor) -> Tensor:
        """(b, N, C, ..., H) to (b * N * C, 1, rows, H)."""
        return rows.flatten(3, -2).flatten(0, 2)[:, None]

    mixed = fused_attention(
        query.flatten(0, 2)[:, None],
        as_batch(key[sequence, head, index_bNCK]),
        as_batch(value[sequence, head, index_bNCK]),
        seen.flatten(3).flatten(0, 2)[:, None, None],
    ).view(query.shape)
    long = [number for number, blocks in enumerate(blocks_b) if blocks > pattern.whole_blocks]
    if long:
        mixed = _with_global_blocks(mixed, query, key_bNSH, value_bNSH, block, long, [blocks_b[i] for i in long])
    return mixed.flatten(2, 3)[:, :, : block.length]


def _slots(blocks_b: list[int], most: int, pattern: BlockPattern, device: torch.device) -> Tensor:
    """Slots of all sequences, (b, N, C, K), with C = `most`; blocks without slots get the first block in their first
    one."""
    by_count = {blocks: pattern.slots(blocks) for blocks in set(blocks_b)}
    widest = max(slots.shape[-1] for slots in by_count.values())
    every = np.full((len(blocks_b), pattern.heads, most, widest), -1)
    for number, blocks in enumerate(blocks_b):
        slots_NCK = by_count[blocks]
        every[number, :, :blocks, : slots_NCK.shape[-1]] = slots_NCK
    nothing = (every < 0).all(axis=-1)
    every[nothing, 0] = 0
    return torch.from_numpy(every).to(device)


def _with_global_blocks(
    mixed_bNCwH: Tensor,
    query_bNCwH: Tensor,
    key_bNSH: Tensor,
    value_bNSH: Tensor,
    block: AttentionBlock,
    long: list[int],
    blocks: list[int],
) -> Tensor:
    """Let the first and the last block of each of these sequences attend to all of its tokens."""
    device = mixed_bNCwH.device
    sequence_l, last_l = torch.tensor(long, device=device), torch.tensor(blocks, device=device) - 1
    place_l2 = torch.stack([torch.zeros_like(last_l), last_l], dim=1)
    first_and_last = query_bNCwH.transpose(1, 2)[sequence_l[:, None], place_l2].transpose(1, 2).flatten(2, 3)
    mask = None if block.mask_b11S is None else block.mask_b11S[sequence_l]
    seen = fused_attention(first_and_last, key_bNSH[sequence_l], value_bNSH[sequence_l], mask)
    by_place = seen.view(*seen.shape[:2], 2, -1, seen.shape[3]).transpose(1, 2)
    place = (sequence_l[:, None].expand_as(place_l2), place_l2)
    return mixed_bNCwH.transpose(1, 2).index_put(place, by_place.to(mixed_bNCwH.dtype)).transpose(1, 2)
