"""Linear maps in bfloat16 over whole blocks of rows, to make new shapes rare for oneDNN.

Not from a paper. oneDNN compiles a product for its exact shape, in half a millisecond to one, and each batch of whole
sequences has a different number of tokens. In an update of BERT at 256 x 4, this took 10% of the time with 32 sequences
and 17% with 8. With rows of zeros after the last token, only half a dozen different numbers of rows occur. The zeros
are written when the states are converted to bfloat16; the products of the other rows are bit-identical.

Shapes: R rows, D inputs, F outputs; P rows in whole blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional

from bertkit.kernels.loading import loaded_kernels

MOST_WEIGHTS = 1 << 20
MOST_ROWS = 1 << 13
"""With more of either, the zeros and a copy of the states cost as much as compiling."""
LEAST_BLOCK = 16
BLOCKS = 16
"""From 256 rows on, rows are rounded up to 16 to 32 blocks, each a power of two long: by 2% on average."""


def whole_blocks(rows: int) -> int:
    """P: the number of rows rounded up to whole blocks."""
    block = max(LEAST_BLOCK, 1 << max(rows // BLOCKS, 1).bit_length() - 1)
    return -(-rows // block) * block


def uses_row_blocks(states: Tensor, weight_FD: Tensor) -> bool:
    """Whether these are multiplied in blocks: in runs with compiled kernels in bfloat16, within the limits above."""
    kernels = loaded_kernels()
    return (
        kernels is not None
        and states.ndim == 2
        and states.device.type == "cpu"
        and states.dtype in (torch.float32, torch.bfloat16)
        and weight_FD.dtype is torch.float32
        and weight_FD.numel() <= MOST_WEIGHTS
        and LEAST_BLOCK < states.shape[0] <= MOST_ROWS
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") is torch.bfloat16
        and torch.bfloat16 in kernels.dtypes
        and forward_ad._current_level < 0  # torch computes forward-mode derivatives
    )


def linear_in_blocks(states_RD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    """states W^T + b in bfloat16, (R, F); a view that must not be written to in place."""
    rows_RF: Tensor = _InBlocks.apply(states_RD, weight_FD, bias_F)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    return rows_RF


def pad_to_row_blocks(rows_RD: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows in this dtype, with zeros after the last one: (P, D)."""
    rows, padded = rows_RD.shape[0], whole_blocks(rows_RD.shape[0])
    if rows == padded:
        return rows_RD.to(dtype).contiguous()
    blocks_PD = rows_RD.new_empty(padded, rows_RD.shape[1], dtype=dtype)
    blocks_PD[:rows] = rows_RD
    blocks_PD[rows:] = 0
    return blocks_PD


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_RD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
        blocks_PD, narrow_FD = pad_to_row_blocks(states_RD, torch.bfloat16), weight_FD.to(torch.bfloat16)
        ctx.save_for_backward(blocks_PD, narrow_FD)
        ctx.rows, ctx.states_type = states_RD.shape[0], states_RD.dtype
        narrow_F = None if bias_F is None else bias_F.to(torch.bfloat16)
        return functional.linear(blocks_PD, narrow_FD, narrow_F)[: ctx.rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (given_RF,) = gradients
        blocks_PD, narrow_FD = ctx.saved_tensors
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad
        given_PF = pad_to_row_blocks(given_RF, torch.bfloat16)
        states_grad = weight_grad = bias_grad = None
        if needs_states:
            states_grad = (given_PF @ narrow_FD)[: ctx.rows].to(ctx.states_type)
        if needs_weight:
            weight_grad = (given_PF.t() @ blocks_PD).float()
        if needs_bias:
            bias_grad = given_PF.sum(dim=0).float()
        return states_grad, weight_grad, bias_grad
