"""Matrix products in float32 by the faster of the two libraries that torch includes for a processor.

Not from a paper. torch multiplies float32 with MKL, which runs its AVX2 code on AMD's processors; oneDNN, which torch
uses for bfloat16, uses AVX-512 there. GFLOP/s of two threads of a Zen 5 processor, torch 2.13, the best of sixteen
products:

| rows x inputs x outputs | states times weights: MKL, oneDNN | gradient of the states | gradient of the weights |
|---|---|---|---|
| 3,810 x 256 x 768 | 214, 465 | 206, 468 | 206, 360 |
| 3,810 x 1,024 x 256 | 209, 458 | 212, 467 | 200, 382 |
| 1,900 x 768 x 3,072 | 211, 460 | 215, 403 | 215, 351 |
| 430 x 384 x 1,536 | 219, 480 | 217, 501 | 213, 466 |
| 570 x 256 x 30,522 (words) | 123, 217 | 203, 351 | 196, 371 |

On Intel's processors both use the same instructions, and torch's choice is kept. The rule depends on the processor, not
on a measurement: results on the same machine are always bit-identical. decoding/packed_weights.py: the few rows of a
model that generates text. bfloat16 products use oneDNN everywhere.

Shapes: R rows, D inputs, F outputs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from bertkit.models.operators.row_blocks import linear_in_blocks, uses_row_blocks

LEAST_SIDE = 256
LEAST_WEIGHTS = 1 << 20
"""oneDNN is used for maps with both sides at least this wide, or this many weights. It compiles a product for each
shape in half a millisecond, which smaller maps do not recover: BERT tiny took 1.7 times as long for single texts."""
LEAST_ROWS = 8
"""Fewer rows stay with MKL, whose results for so few rows are not bit-identical to those for more in any case. Above
this limit the number of rows has no influence, so a row's result is bit-identical in any batch
(`inference/independent_batches.py`)."""
_WIDE = 512
"""A weight gradient at least this wide is computed as it is stored. A narrower one is computed with its longer side
inside, up to three times faster, and then transposed; for wide ones, transposing costs as much as this saves."""

_torch_alone = False


@contextmanager
def use_torch_matmul(wanted: bool = True) -> Iterator[None]:
    """Within this context torch chooses the library, if `wanted`."""
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
        return "AuthenticAMD" in platform.processor()  # on Windows


class Linear(nn.Linear):
    """torch's linear map, computed by the faster library."""

    __call__: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def is_plain_linear(part: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether this is a linear map, and not a subclass with weights of another kind."""
    return type(part) in (Linear, nn.Linear)


def float32_library() -> str:
    """The library that currently multiplies float32: oneDNN, or torch's choice."""
    return "oneDNN" if onednn_is_faster() and not _torch_alone else "torch"


def linear(states: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """states W^T + b, like `torch.nn.functional.linear`: (..., D) to (..., F)."""
    if uses_row_blocks(states, weight_FD):
        return linear_in_blocks(states, weight_FD, bias_F)
    if not uses_onednn(states, weight_FD):
        return functional.linear(states, weight_FD, bias_F)
    rows_RD = states.reshape(-1, states.shape[-1])
    rows_RF: Tensor = _Linear.apply(rows_RD, weight_FD, bias_F)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    return rows_RF if states.ndim == 2 else rows_RF.view(*states.shape[:-1], -1)


def uses_onednn(states: Tensor, weight_FD: Tensor) -> bool:
    """Whether `linear` uses oneDNN for these tensors."""
    return weight_FD.dtype is torch.float32 and _is_by_onednn(states, *weight_FD.shape)


def _is_by_onednn(states: Tensor, outputs: int, inputs: int) -> bool:
    """Whether oneDNN multiplies these states by a map's weights, in the forward and the backward pass."""
    if torch.compiler.is_compiling() or states.device.type != "cpu" or not onednn_is_faster():
        return False
    return (
        states.dtype is torch.float32
        and (min(outputs, inputs) >= LEAST_SIDE or outputs * inputs >= LEAST_WEIGHTS)
        and states.shape[-1] == inputs
        and states.numel() >= LEAST_ROWS * inputs
        and not _torch_alone
        and not torch.is_autocast_enabled("cpu")
        and forward_ad._current_level < 0  # torch computes forward-mode derivatives
        and bool(torch.backends.mkldnn.enabled)
    )


def states_gradient(gradient_RF: Tensor, weight_FD: Tensor) -> Tensor:
    """gradient W, (R, D): the gradient of `linear` with respect to its states."""
    if not uses_onednn(gradient_RF, weight_FD.t()):
        return gradient_RF @ weight_FD
    return _states_gradient(gradient_RF, weight_FD)


def weight_gradient(gradient_RF: Tensor, states_RD: Tensor, total_FD: Tensor | None) -> Tensor:
    """gradient^T states, (F, D): the gradient of `linear` with respect to its weight.

    Args:
        total_FD: gradient of earlier rows, to which this one is added in place; None if there are none.
    """
    if _is_by_onednn(states_RD, gradient_RF.shape[1], states_RD.shape[1]):
        product_FD = _weight_gradient(gradient_RF, states_RD)
        return product_FD.contiguous() if total_FD is None else total_FD.add_(product_FD)
    if total_FD is None:
        return gradient_RF.t() @ states_RD
    return total_FD.addmm_(gradient_RF.t(), states_RD)


def _states_gradient(gradient_RF: Tensor, weight_FD: Tensor) -> Tensor:
    return _product(gradient_RF.contiguous(), weight_FD.contiguous().t(), None)


def _weight_gradient(gradient_RF: Tensor, states_RD: Tensor) -> Tensor:
    """(F, D), possibly in the layout of its transpose; see `_WIDE`."""
    left_FR, right_DR = gradient_RF.contiguous().t(), states_RD.contiguous().t()
    outputs, inputs = left_FR.shape[0], right_DR.shape[0]
    if inputs >= min(outputs, _WIDE):
        return _product(left_FR, right_DR, None)
    return _product(right_DR, left_FR, None).t()


def _product(states_RD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    """Product of contiguous or transposed matrices; for other strides oneDNN only has its reference code."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(states_RD, weight_FD, bias_F, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    """`linear` by oneDNN; second derivatives use torch's products."""

    @staticmethod
    def forward(ctx: Any, states_RD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
        needs_states, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(states_RD if needs_weight else None, weight_FD if needs_states else None)
        bias_F = None if bias_F is None else bias_F.contiguous()
        return _product(states_RD.contiguous(), weight_FD.contiguous(), bias_F)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        states_RD, weight_FD = ctx.saved_tensors
        (given_RF,) = gradients
        states_grad = weight_grad = None
        if torch.is_grad_enabled():  # create_graph: the gradient will be differentiated
            states_grad = None if weight_FD is None else given_RF @ weight_FD
            weight_grad = None if states_RD is None else given_RF.t() @ states_RD
        else:
            given_RF = given_RF.contiguous()
            states_grad = None if weight_FD is None else _states_gradient(given_RF, weight_FD)
            weight_grad = None if states_RD is None else _weight_gradient(given_RF, states_RD)
        return states_grad, weight_grad, given_RF.sum(dim=0) if ctx.needs_input_grad[2] else None
