"""Dropout from sixteen random bits per element.

Srivastava et al. 2014, JMLR 15. Differs from torch.nn.functional.dropout in how the mask is drawn: torch's Bernoulli
sampler takes ten times as long on a CPU, a quarter of a training step at small widths. The bits come from numpy's SFC64
(Doty-Humphrey's PractRand), seeded by one draw from torch's generator, whose own bits take three times as long. The
dropout rate is rounded to a multiple of 2^-16, and kept elements are scaled by the rounded rate, so the expectation is
exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bertkit.kernels import ops
from bertkit.kernels.loading import loaded_kernels
from bertkit.kernels.ops import Drop
from bertkit.models.operators.eager import eager, exclude_from_compile

_LEVELS = 1 << 16
_LANES = 4
"""16-bit numbers per 64-bit draw."""


class _Dropout(torch.autograd.Function):
    """Keeps the scaled mask for the backward pass in the input's type: a product of mixed types is several times
    slower."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, drop: Drop) -> Tensor:
        keep = drop.bits >= drop.threshold
        mask = keep.view(hidden.shape).to(hidden.dtype).mul_(drop.scale)
        ctx.save_for_backward(mask)
        return hidden * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return gradients[0] * mask, None


def drawn(count: int, rate: float) -> Drop | None:
    """Which of `count` elements to drop, each with probability `rate`; None for a rate of 0.

    Draws from torch's default generator, whose state is checkpointed.
    """
    if not rate:
        return None
    dropped_levels = min(round(rate * _LEVELS), _LEVELS - 1)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    return Drop(
        _bits(seed, -(-count // _LANES))[:count], dropped_levels - _LEVELS // 2, _LEVELS / (_LEVELS - dropped_levels)
    )


def _bits(seed: int, words: int) -> Tensor:
    """Sixteen random bits per element, int16, `_LANES` elements per 64-bit word."""
    kernels = loaded_kernels()
    if kernels is not None:
        return ops.random_words(kernels, seed, words).view(torch.int16)
    return torch.from_numpy(np.random.SFC64(seed).random_raw(words).view(np.int16))


def dropout(hidden: Tensor, rate: float, *, training: bool) -> Tensor:
    """Zero each element with probability `rate` and scale the rest, in training; otherwise the input itself."""
    if not training or rate == 0:
        return hidden
    if hidden.device.type != "cpu":
        return functional.dropout(hidden, rate)
    return eager(_dropped)(hidden, rate)


@exclude_from_compile
def _dropped(hidden: Tensor, rate: float) -> Tensor:
    return _Dropout.apply(hidden, drawn(hidden.numel(), rate))  # type: ignore[no-untyped-call, no-any-return]  # torch leaves Function.apply untyped


class Dropout(torch.nn.Module):
    """`dropout` as a module."""

    __call__: Callable[..., Tensor]

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, hidden: Tensor) -> Tensor:
        return dropout(hidden, self.rate, training=self.training)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
