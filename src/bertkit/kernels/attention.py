"""Attention of packed sequences in one compiled CPU kernel, without padding to rectangles.

Dao 2023, FlashAttention-2, arXiv:2307.08691, does the same on a GPU: probabilities are not kept, and the backward pass
recomputes them. The kernel is for bfloat16 and uses the instructions that multiply pairs of bfloat16 numbers. oneDNN
would compile each product of this size again for every new number and length of sequences in a batch. Sibling ops.py
has the other kernels; models/attention/self_attention.py has the padded version, with which a test compares this one.

Shapes: T packed tokens, N heads, H head width, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertkit.kernels.loading import Kernels
from bertkit.kernels.ops import Drop

HEAD_STEP = 16
"""The head width must be a multiple of this."""
_NAME = "attention"


def has_attention(kernels: Kernels) -> bool:
    """Whether the kernel is used on this CPU."""
    # oneDNN's products use AMX tiles if the CPU has them; the kernel does not.
    return not torch.cpu._is_amx_tile_supported() and kernels.has(_NAME, torch.bfloat16)


def can_attend(kernels: Kernels, query_TNH: Tensor, key_TNH: Tensor, value_TNH: Tensor) -> bool:
    """Whether the kernel supports these tensors."""
    rows = (query_TNH, key_TNH, value_TNH)
    same = all(each.dtype == torch.bfloat16 and each.shape[1:] == query_TNH.shape[1:] for each in rows)
    return same and query_TNH.shape[-1] % HEAD_STEP == 0 and has_attention(kernels)


@dataclass(frozen=True)
class AttentionRange:
    """Which keys a query attends to in its sequence, and how.

    Attributes:
        bounds_B1: int32; the first token of each sequence, followed by the total number of tokens.
        causal_B: uint8; whether attention within each sequence is causal; None: it is causal in none.
        left, right: the most tokens before and after a query that it attends to; -1: all.
        scale: factor of the scores.
        one_query: whether each sequence has a single query, which attends to all its tokens; otherwise every token is a
            query.
    """

    bounds_B1: Tensor
    causal_B: Tensor | None
    left: int
    right: int
    scale: float
    one_query: bool = False

    def cells(self, heads: int) -> tuple[Tensor, int]:
        """Offset of each sequence's probabilities among all of them, int64 (B,), and their total number.

        Within a sequence they are ordered by head, query and key.
        """
        length_B = self.bounds_B1.diff().long()
        count_B = heads * length_B * (1 if self.one_query else length_B)
        return count_B.cumsum(0) - count_B, int(count_B.sum())


def packed_attention(
    kernels: Kernels,
    query_TNH: Tensor,
    key_TNH: Tensor,
    value_TNH: Tensor,
    reach: AttentionRange,
    drop: Drop | None,
) -> Tensor:
    """Attention output of every query within its sequence, bfloat16, in the queries' shape; arithmetic is in float32.

    Args:
        query_TNH, key_TNH, value_TNH: bfloat16; see `can_attend`. With one query per sequence there are B queries.
        reach: which keys the queries attend to.
        drop: dropout of the probabilities, for as many elements as `AttentionRange.cells` returns; None: no dropout.
    """
    result: Tensor = _PackedAttention.apply(query_TNH, key_TNH, value_TNH, reach, drop, kernels)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    return result


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_TNH: Tensor,
        key_TNH: Tensor,
        value_TNH: Tensor,
        reach: AttentionRange,
        drop: Drop | None,
        kernels: Kernels,
    ) -> Tensor:
        rows = [_by_row(each) for each in (query_TNH, key_TNH, value_TNH)]
        out = torch.empty(query_TNH.shape, dtype=torch.bfloat16)
        log_sum = torch.empty(query_TNH.shape[:2])
        kernels.call(_NAME, torch.bfloat16, *_arguments(rows, reach, drop), out, log_sum)
        ctx.save_for_backward(*rows, log_sum)
        ctx.reach, ctx.drop, ctx.kernels = reach, drop, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *rows, log_sum = ctx.saved_tensors
        given = gradients[0].to(torch.bfloat16).contiguous()
        if joined_columns([each.flatten(1) for each in rows]) is None:
            found = [torch.empty(each.shape, dtype=torch.bfloat16) for each in rows]
        else:  # lay out the gradients likewise, which saves joining them for a single product
            tokens, heads, width = rows[0].shape
            found = list(torch.empty(tokens, len(rows), heads, width, dtype=torch.bfloat16).unbind(1))
        arguments = _arguments(rows, ctx.reach, ctx.drop)
        ctx.kernels.call(f"{_NAME}_backward", torch.bfloat16, *arguments, given, log_sum, *found, found[0].stride(0))
        return *found, None, None, None


def joined_columns(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor (T, sum of F) of which the parts, each (T, F), are all the columns in order; None if there is none."""
    first = parts[0]
    width = sum(each.shape[1] for each in parts)
    expected = first.data_ptr()
    for each in parts:
        same_memory = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same_memory or each.data_ptr() != expected or each.stride() != (width, 1) or len(each) != len(first):
            return None
        expected += each.shape[1] * each.element_size()
    return first.as_strided((first.shape[0], width), (width, 1))


def _by_row(rows_TNH: Tensor) -> Tensor:
    """The same rows with the heads of a token adjacent in memory."""
    steps = rows_TNH.stride()
    return rows_TNH if steps[2] == 1 and steps[1] == rows_TNH.shape[2] and steps[0] % 2 == 0 else rows_TNH.contiguous()


def _arguments(rows: list[Tensor], reach: AttentionRange, drop: Drop | None) -> list[Tensor | int | float | None]:
    """The arguments that both passes share."""
    _, heads, width = rows[0].shape
    starts_B = None if drop is None else reach.cells(heads)[0]
    bits, threshold, scale = (None, 0, 1.0) if drop is None else drop
    tensors = [part for each in rows for part in (each, each.stride(0))]
    sizes = (reach.bounds_B1.numel() - 1, heads, width, reach.one_query, reach.left, reach.right)
    return [*tensors, reach.bounds_B1, reach.causal_B, starts_B, bits, *sizes, threshold, scale, reach.scale]
