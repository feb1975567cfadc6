"""Matrix products in float32 by the faster of the two libraries that torch brings for a processor.

Nothing here follows a paper. torch multiplies float32 by MKL, which gives AMD's processors its code for AVX2; oneDNN,
which torch keeps for bfloat16, uses AVX-512 there. GFLOP/s of two threads of a Zen 5 processor, torch 2.13, the best of
sixteen products:

| rows x inputs x outputs | states times weights: MKL, oneDNN | gradient of the states | gradient of the weights |
|---|---|---|---|
| 3,810 x 256 x 768 | 214, 465 | 206, 468 | 206, 360 |
| 3,810 x 1,024 x 256 | 209, 458 | 212, 467 | 200, 382 |
| 1,900 x 768 x 3,072 | 211, 460 | 215, 403 | 215, 351 |
| 430 x 384 x 1,536 | 219, 480 | 217, 501 | 213, 466 |
| 570 x 256 x 30,522 (words) | 123, 217 | 203, 351 | 196, 371 |

On Intel's processors both use the same instructions, and torch's choice stays. The rule asks for the processor, not for
a measurement: the same machine always computes the same bits. Sibling packed_weights.py is for the few rows of a model
that writes; bfloat16 is oneDNN's everywhere.

Shapes: R rows, D inputs, F outputs.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

LEAST_WEIGHTS = 1 << 16
"""Of a map. oneDNN compiles a product for each shape in half a millisecond, which small maps do not save again."""
LEAST_ROWS = 16
"""Fewer are read faster by MKL. More decide nothing, so that a row has the same bits in any company
(`inference/independent_batches.py` gives every map a multiple of this)."""

_torch_alone = False


@contextmanager
def products_by_torch(wanted: bool = True) -> Iterator[None]:
    """Within the context torch's choice of library stays, if wanted."""
    global _torch_alone
    before = _torch_alone
    _torch_alone = wanted
    try:
        yield
    finally:
        _torch_alone = before


@cache
def onednn_is_faster() -> bool:
    """Whether this processor has instructions that oneDNN uses and MKL does not: an AMD processor with AVX-512."""
    multiplies_by_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # torch's
    return bool(multiplies_by_mkl and has_onednn(torch.float32) and _is_amd() and torch.cpu._is_avx512_supported())


def has_onednn(dtype: torch.dtype) -> bool:
    """Whether this processor and this torch have oneDNN's products of plain tensors, and its packed weights."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch's
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "AuthenticAMD" in platform.processor()  # as Windows has it


class Linear(nn.Linear):
    """torch's linear map, multiplied by the faster library."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def is_plain_linear(part: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether this is a linear map and no subclass with weights of another kind."""
    return type(part) in (Linear, nn.Linear)


def linear(states: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """states W^T + b, as `torch.nn.functional.linear`: (..., D) to (..., F)."""
    if not by_onednn(states, weight_FD):
        return functional.linear(states, weight_FD, bias_F)
    rows_RD = states.reshape(-1, states.shape[-1])
    rows_RF: Tensor = _Linear.apply(rows_RD, weight_FD, bias_F)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    return rows_RF if states.ndim == 2 else rows_RF.view(*states.shape[:-1], -1)


def by_onednn(states: Tensor, weight_FD: Tensor) -> bool:
    """Whether `linear` multiplies these by oneDNN."""
    return (
        weight_FD.numel() >= LEAST_WEIGHTS
        and states.numel() >= LEAST_ROWS * weight_FD.shape[1]
        and states.dtype is torch.float32
        and weight_FD.dtype is torch.float32
        and states.device.type == "cpu"
        and not _torch_alone
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and onednn_is_faster()
    )


def states_gradient(gradient_RF: Tensor, weight_FD: Tensor) -> Tensor:
    """gradient W, (R, D): what `linear` gives back to its states."""
    if not by_onednn(gradient_RF, weight_FD.t()):
        return gradient_RF @ weight_FD
    return _states_gradient(gradient_RF, weight_FD)


def add_weight_gradient(total_FD: Tensor, gradient_RF: Tensor, states_RD: Tensor, *, is_first: bool) -> None:
    """Add gradient^T states, what `linear` gives back to its weight; the first one is put in place of what is there."""
    if not by_onednn(states_RD, total_FD):
        total_FD.addmm_(gradient_RF.t(), states_RD, beta=0 if is_first else 1)
    elif is_first:
        total_FD.copy_(_weight_gradient(gradient_RF, states_RD))
    else:
        total_FD.add_(_weight_gradient(gradient_RF, states_RD))


def _states_gradient(gradient_RF: Tensor, weight_FD: Tensor) -> Tensor:
    return _product(gradient_RF.contiguous(), weight_FD.contiguous().t(), None)


def _weight_gradient(gradient_RF: Tensor, states_RD: Tensor) -> Tensor:
    """(F, D), maybe in the layout of its transpose: with the longer side of the result inside, oneDNN multiplies at up
    to three times the speed."""
    left_FR, right_DR = gradient_RF.contiguous().t(), states_RD.contiguous().t()
    if right_DR.shape[0] > left_FR.shape[0]:
        return _product(left_FR, right_DR, None)
    return _product(right_DR, left_FR, None).t()


def _product(states_RD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    """Of matrices that are contiguous or transposed: for other strides oneDNN has nothing but its reference code."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(states_RD, weight_FD, bias_F, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_RD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
        needs_states, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(states_RD if needs_weight else None, weight_FD if needs_states else None)
        bias_F = None if bias_F is None else bias_F.contiguous()
        return _product(states_RD.contiguous(), weight_FD.contiguous(), bias_F)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        states_RD, weight_FD = ctx.saved_tensors
        gradient_RF = gradients[0].contiguous()
        return (
            None if weight_FD is None else _states_gradient(gradient_RF, weight_FD),
            None if states_RD is None else _weight_gradient(gradient_RF, states_RD),
            gradient_RF.sum(dim=0) if ctx.needs_input_grad[2] else None,
        )
