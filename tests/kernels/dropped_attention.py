"""Attention of packed sequences as defined by kernels/gpu_attention.py, in plain float64 operators."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bertkit.kernels import gpu_attention
from bertkit.kernels.gpu_attention import draw, drop_below


class Case(NamedTuple):
    """Sequences, heads and options of an attention."""

    lengths: tuple[int, ...] = (5, 117, 1, 64, 130, 33)
    heads: int = 3
    width: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: tuple[int, int] = (-1, -1)
    rate: float = 0.0

    def drawn(self, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Queries, keys and values as columns of one tensor, with gradients; the bounds; and the outputs' gradient."""
        generator = torch.Generator().manual_seed(0)
        tokens = sum(self.lengths)
        rows = torch.randn(tokens, 3, self.heads, self.width, generator=generator)
        given = torch.randn(tokens, self.heads, self.width, generator=generator).to(device, self.dtype)
        bounds = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)
        joined = rows.to(device, self.dtype).requires_grad_()
        return joined.unbind(1), bounds, given


def kept_probabilities(drawn: Tensor, tokens: int, heads: int, rate: float, start: int, end: int) -> Tensor:
    """Which probabilities of a sequence are kept, (N, S, S), queries before keys."""
    keys, queries, of_heads = drawn.split([tokens, tokens, heads])
    products = of_heads[:, None, None] * queries[start:end, None] * keys[start:end]
    return products >= drop_below(rate)


def plain_attention(
    rows: tuple[Tensor, ...], bounds_B1: Tensor, drawn: Tensor, window: tuple[int, int], scale: float, rate: float
) -> Tensor:
    """The attention output per token, (T, N, H), in float64."""
    tokens, heads, _ = rows[0].shape
    mixed = []
    for start, end in pairwise(bounds_B1.tolist()):
        query, key, value = (each[start:end].transpose(0, 1).double() for each in rows)
        place_S = torch.arange(end - start, device=query.device)
        behind_SS = place_S - place_S[:, None]
        left, right = (end - start if side < 0 else side for side in window)
        seen_SS = (behind_SS >= -left) & (behind_SS <= right)
        p_NSS = (query @ key.transpose(1, 2) * scale).masked_fill(~seen_SS, -torch.inf).softmax(-1)
        if rate:
            p_NSS = p_NSS * kept_probabilities(drawn, tokens, heads, rate, start, end) / (1 - rate)
        mixed.append((p_NSS @ value).transpose(0, 1))
    return torch.cat(mixed)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Error over all numbers together, relative to their norm."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@contextmanager
def operators_on_a_processor() -> Iterator[None]:
    """Also implement the kernels' operators for CPU tensors with plain operators."""

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, log_sum, drawn = gpu_attention._results(*arguments)
        query, key, value, bounds_B1, _, left, right, scale, rate = arguments
        draw(drawn)
        exact = plain_attention((query, key, value), bounds_B1, drawn, (left, right), scale, rate)
        return out.copy_(exact), log_sum.zero_(), drawn

    def joined(rows: Tensor, bounds: Tensor, longest: int, scale: float, rate: float) -> tuple[Tensor, ...]:
        return forward(*rows.unbind(1), bounds, longest, -1, -1, scale, rate)

    def backward(out: Tensor, given: Tensor, log_sum: Tensor, drawn: Tensor, *arguments: Any) -> Tensor:
        found = torch.empty(out.shape[0], 3, *out.shape[1:], dtype=out.dtype)

        def of_graph() -> None:  # an operator's own thread records no gradients
            *rows, bounds_B1, _, left, right, scale, rate = arguments
            leaves = [each.detach().requires_grad_() for each in rows]
            exact = plain_attention(tuple(leaves), bounds_B1, drawn, (left, right), scale, rate)
            found.copy_(torch.stack(torch.autograd.grad(exact, leaves, given.to(exact.dtype)), dim=1))

        with ThreadPoolExecutor(1) as other:
            other.submit(of_graph).result(timeout=60)
        return found

    with torch.library._scoped_library("bertkit", "IMPL") as library:
        library.impl("packed_attention", forward, "CPU")
        library.impl("packed_attention_backward", backward, "CPU")
        library.impl("joined_attention", joined, "CPU")
        yield
