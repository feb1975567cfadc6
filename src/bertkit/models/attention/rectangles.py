"""Packed rows as rectangles of sequences of similar length, and back.

Not from a paper. `PackedSequences` (data/batch.py) has the rows of each rectangle. Sibling self_attention.py:
attention within a rectangle; varlen.py: kernels that need none.

Shapes: T packed tokens, N heads, H head width; b sequences of one block, S its longest; P cells of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bertkit.data.batch import AttentionBlock, PackedSequences


class _Regroup(torch.autograd.Function):
    """Permute rows; backward gathers by the inverse index, which is faster than adding by index.

    Correct only if every row that `forward_index` repeats or `backward_index` omits has a zero gradient. Such rows are
    the padding cells of a block, which are masked as keys and dropped as queries.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, forward_index: Tensor, backward_index: Tensor) -> Tensor:
        ctx.save_for_backward(backward_index)
        return rows.index_select(0, forward_index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (backward_index,) = ctx.saved_tensors
        return gradients[0].index_select(0, backward_index), None, None


class _Ungroup(torch.autograd.Function):
    """Select the rows of the packed tokens from the cells of the blocks; backward fills padding cells with zeros."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, scatter_T: Tensor) -> Tensor:
        ctx.save_for_backward(scatter_T)
        ctx.shape = cells.shape
        return cells.index_select(0, scatter_T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (scatter_T,) = ctx.saved_tensors
        cells = gradients[0].new_zeros(ctx.shape)
        cells[scatter_T] = gradients[0]
        return cells, None


def to_blocks(rows_TNH: Tensor, sequences: PackedSequences) -> list[Tensor]:
    """Packed rows as one tensor (b, N, S, H) per block."""
    if sequences.gather_P is None:
        cells_PNH = rows_TNH
    else:
        cells_PNH = _Regroup.apply(rows_TNH, sequences.gather_P, sequences.scatter_T)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    sizes = [block.sequences * block.length for block in sequences.blocks]
    return [
        cells.view(block.sequences, block.length, *cells.shape[1:]).transpose(1, 2)
        for cells, block in zip(torch.split(cells_PNH, sizes), sequences.blocks, strict=True)
    ]


def in_blocks(
    query_TNH: Tensor, key_TNH: Tensor, value_TNH: Tensor, sequences: PackedSequences
) -> Iterator[tuple[Tensor, Tensor, Tensor, AttentionBlock]]:
    """Queries, keys and values of each block, each (b, N, S, H), and the block itself."""
    parts = (to_blocks(rows_TNH, sequences) for rows_TNH in (query_TNH, key_TNH, value_TNH))
    return zip(*parts, sequences.blocks, strict=True)


def from_blocks(blocks_bNSH: list[Tensor], sequences: PackedSequences) -> Tensor:
    """The inverse of `to_blocks`: (T, N, H)."""
    cells = [block.transpose(1, 2).flatten(0, 1) for block in blocks_bNSH]
    cells_PNH = cells[0] if len(cells) == 1 else torch.cat(cells)
    if sequences.scatter_T is None:
        return cells_PNH
    return _Ungroup.apply(cells_PNH, sequences.scatter_T)  # type: ignore[no-untyped-call, no-any-return]  # torch leaves Function.apply untyped
