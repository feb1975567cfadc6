"""Windowed attention in time and memory linear in the length.

Beltagy et al. 2020, Longformer, arXiv:2004.05150, section 3.1: the sliding window and global tokens. Queries are
processed in chunks as long as one side of the window, each with the keys of its own chunk and its two neighbours.
Sequences no longer than a window are processed whole, and so is everything that is recorded.

Shapes: T packed tokens, N heads, H head width; b sequences of one block, S its longest, C chunks of w queries, K keys
of a chunk, G global tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bertkit.data.batch import AttentionBlock, PackedSequences
from bertkit.models.attention.key_value_cache import through_cache
from bertkit.models.attention.rectangles import from_blocks, in_blocks, to_blocks
from bertkit.models.attention.self_attention import attend_block, is_recorded, visible_cells
from bertkit.models.attention.varlen import Heads, attend_packed
from bertkit.models.operators.eager import eager, exclude_from_compile
from bertkit.models.recorder import Scope


@dataclass(frozen=True)
class BlockGlobals:
    """The global tokens of a block's sequences.

    Attributes:
        is_global_bS: whether each column is a global token.
        column_bG: the columns of global tokens, then arbitrary ones.
        real_bG: where `column_bG` is the column of a global token.
    """

    is_global_bS: Tensor
    column_bG: Tensor
    real_bG: Tensor

    def pick(self, rows_bNSH: Tensor) -> Tensor:
        """The rows of the global tokens, (b, N, G, H)."""
        index = self.column_bG[:, None, :, None].expand(-1, rows_bNSH.shape[1], -1, rows_bNSH.shape[-1])
        return rows_bNSH.gather(2, index)

    def put(self, rows_bNSH: Tensor, global_bNGH: Tensor) -> Tensor:
        """The block with the rows of the global tokens replaced, (b, N, S, H)."""
        sequence, slot = self.real_bG.nonzero(as_tuple=True)
        place = (sequence, self.column_bG[sequence, slot])
        values = global_bNGH.transpose(1, 2)[sequence, slot].to(rows_bNSH.dtype)
        return rows_bNSH.transpose(1, 2).index_put(place, values).transpose(1, 2)


class GlobalTokens:
    """The global tokens of a batch, block by block.

    Args:
        is_global_T: bool.
        sequences: sequences of the batch, whose blocks are indexed once.
    """

    def __init__(self, is_global_T: Tensor, sequences: PackedSequences) -> None:
        self._is_global_T = is_global_T
        self._sequences = sequences
        self._found = self._find(sequences)

    def by_block(self, sequences: PackedSequences) -> list[BlockGlobals]:
        """The global tokens of each block, in order."""
        return self._found if sequences is self._sequences else self._find(sequences)

    def _find(self, sequences: PackedSequences) -> list[BlockGlobals]:
        pairs = zip(to_blocks(self._is_global_T[:, None, None], sequences), sequences.blocks, strict=True)
        return [_globals_of(flags[:, 0, :, 0], block) for flags, block in pairs]


def _globals_of(is_global_bS: Tensor, block: AttentionBlock) -> BlockGlobals:
    if block.mask_b11S is not None:
        is_global_bS = is_global_bS & block.mask_b11S[:, 0, 0]
    counts_b = is_global_bS.sum(dim=1)
    most = int(counts_b.max())
    column_bG = is_global_bS.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    real_bG = torch.arange(most, device=counts_b.device) < counts_b[:, None]
    return BlockGlobals(is_global_bS, column_bG, real_bG)


def keys_in_window(length: float, each_side: int) -> float:
    """Number of keys scored for a query: three chunks as long as one side, or all keys of a short sequence."""
    return length if length <= 2 * each_side else 3.0 * each_side


def recorded(scope: Scope) -> bool:
    """Whether scores or probabilities are recorded."""
    return is_recorded(scope) or scope.needs("hook_global_pattern")


def sliding_window_attention(
    query_TNH: Tensor,
    key_TNH: Tensor,
    value_TNH: Tensor,
    sequences: PackedSequences,
    *,
    each_side: int,
    dropout_rate: float,
    scope: Scope,
    tokens: GlobalTokens | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Every token attends to tokens at most `each_side` away and to global ones; returns (T, N, H).

    Args:
        each_side: number of tokens on either side.
        dropout_rate: dropout on the attention probabilities; 0 outside training.
        scope: points `hook_attn_scores` and `hook_pattern`, as in `attend`.
        tokens: global tokens, visible to all.
        causal: whether tokens attend to none after them; without global tokens.
        scale: factor of the scores; None: one over the square root of the head width.
    """
    heads = (query_TNH, key_TNH, value_TNH)
    cached_TNH = through_cache(*heads, sequences, scale=scale, each_side=each_side)
    if cached_TNH is not None:
        return cached_TNH
    obstacle = _needs_scores(scope, tokens)
    reach: dict[str, Any] = {"each_side": each_side, "causal": causal, "scale": scale, "dropout_rate": dropout_rate}
    packed_TNH = attend_packed(*heads, sequences, obstacle=obstacle, **reach)
    if packed_TNH is not None:
        return packed_TNH
    return eager(_attend_near_in_rectangles)(heads, sequences, scope=scope, tokens=tokens, **reach)


@exclude_from_compile
def _attend_near_in_rectangles(
    heads: Heads,
    sequences: PackedSequences,
    *,
    each_side: int,
    causal: bool,
    scale: float | None,
    dropout_rate: float,
    scope: Scope,
    tokens: GlobalTokens | None,
) -> Tensor:
    """`sliding_window_attention` if neither a cache nor the kernel for packed sequences computes it."""
    if recorded(scope):
        sequences = sequences.as_one_block()
    marks = [None] * len(sequences.blocks) if tokens is None else tokens.by_block(sequences)
    mixed = []
    for (query, key, value, block), found in zip(in_blocks(*heads, sequences), marks, strict=True):
        if causal:
            all_b = torch.ones(block.sequences, dtype=torch.bool, device=query.device)
            block = replace(block, causal_b=all_b)
        if recorded(scope) or torch.compiler.is_exporting() or block.length <= 2 * each_side:
            mask = _whole_mask(block, found, each_side, query.device)
            mixed.append(
                attend_block(query, key, value, mask, block, dropout_rate=dropout_rate, scope=scope, scale=scale)
            )
        else:
            mixed.append(_in_chunks(query, key, value, block, found, each_side, scale, dropout_rate))
    return from_blocks(mixed, sequences)


def _needs_scores(scope: Scope, tokens: GlobalTokens | None) -> str | None:
    """Why a window needs the scores or probabilities of its pairs of tokens; None if it does not."""
    if tokens is not None:
        return "some tokens attend to all others"
    return "scores or probabilities are recorded" if recorded(scope) else None


def _whole_mask(block: AttentionBlock, marks: BlockGlobals | None, each_side: int, device: torch.device) -> Tensor:
    """Which keys each query attends to, broadcastable to (b, N, S, S)."""
    position_S = torch.arange(block.length, device=device)
    seen = visible_cells(block, (position_S[:, None] - position_S).abs() <= each_side)
    assert seen is not None
    return seen if marks is None else seen | marks.is_global_bS[:, None, None]


def _in_chunks(
    query_bNSH: Tensor,
    key_bNSH: Tensor,
    value_bNSH: Tensor,
    block: AttentionBlock,
    marks: BlockGlobals | None,
    side: int,
    scale: float | None,
    rate: float,
) -> Tensor:
    """Chunk c of queries attends to the keys of chunks c - 1 to c + 1 and to the global keys, which are appended."""
    length, chunks = block.length, -(-block.length // side)
    missing = chunks * side - length

    def keys_of_chunks(rows_bNSH: Tensor) -> Tensor:
        padded = functional.pad(rows_bNSH, (0, 0, side, side + missing))
        near = padded.unfold(2, 3 * side, side).transpose(-1, -2)
        if marks is not None:
            all_see = marks.pick(rows_bNSH)[:, :, None].expand(-1, -1, chunks, -1, -1)
            near = torch.cat([near, all_see], dim=3)
        return near.transpose(1, 2).flatten(0, 1)

    padded_bNSH = functional.pad(query_bNSH, (0, 0, 0, missing))
    heads, width = query_bNSH.shape[1], query_bNSH.shape[3]
    query = padded_bNSH.reshape(-1, heads, chunks, side, width).transpose(1, 2).flatten(0, 1)
    key, value = keys_of_chunks(key_bNSH), keys_of_chunks(value_bNSH)
    mask = _chunk_mask(block, marks, side, query.device)
    whole = AttentionBlock(query.shape[0], side, None)
    mixed = attend_block(query, key, value, mask, whole, dropout_rate=rate, scale=scale)
    joined = mixed.view(-1, chunks, heads, side, width).transpose(1, 2).flatten(2, 3)
    return joined[:, :, :length]


def _chunk_mask(block: AttentionBlock, marks: BlockGlobals | None, side: int, device: torch.device) -> Tensor:
    """(b * C, 1, w, K). Global keys are visible in the appended part, and therefore hidden among the nearby ones. A
    query without any key, such as padding, attends to itself."""
    chunks = -(-block.length // side)
    missing = chunks * side - block.length
    real_bS = torch.ones(block.sequences, block.length, dtype=torch.bool, device=device)
    if block.mask_b11S is not None:
        real_bS = block.mask_b11S[:, 0, 0]
    near_bS = real_bS if marks is None else real_bS & ~marks.is_global_bS
    near_bCK = functional.pad(near_bS, (side, side + missing)).unfold(1, 3 * side, side)
    query_w1, key_K = torch.arange(side, device=device)[:, None], torch.arange(3 * side, device=device) - side
    seen_bCwK = ((query_w1 - key_K).abs() <= side) & near_bCK[:, :, None]
    if block.causal_b is not None:
        seen_bCwK = seen_bCwK & ((key_K <= query_w1) | ~block.causal_b[:, None, None, None])
    itself_wK = query_w1 == key_K
    if marks is not None:
        all_see = marks.real_bG[:, None, None].expand(-1, chunks, side, -1)
        seen_bCwK = torch.cat([seen_bCwK, all_see], dim=-1)
        itself_wK = functional.pad(itself_wK, (0, all_see.shape[-1]))
    seen_bCwK = seen_bCwK | (itself_wK & ~seen_bCwK.any(dim=-1, keepdim=True))
    return seen_bCwK.flatten(0, 1)[:, None]
