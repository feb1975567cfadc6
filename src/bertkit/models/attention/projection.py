"""Queries, keys and values of attention: linear maps that all read the same states, one by one or in one product.

Vaswani et al. 2017, arXiv:1706.03762, section 3.2. Sibling self_attention.py: the attention computed from them.

Shapes: T packed tokens, D width, F outputs of a map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.kernels.attention import has_attention, joined_columns
from bertkit.kernels.loading import loaded_kernels
from bertkit.models.operators.matmul import is_plain_linear, linear

Projection = Callable[[Sequence[nn.Module], Tensor], Sequence[Tensor]]
"""Linear maps and the states that they all read, (T, D), to the output of each, (T, F)."""


def project_separately(maps: Sequence[nn.Module], hidden_TD: Tensor) -> Sequence[Tensor]:
    """The plain `Projection`."""
    return [each(hidden_TD) for each in maps]


def project_at_once(maps: Sequence[nn.Module], hidden_TD: Tensor) -> Sequence[Tensor]:
    """`project_separately` in one product, on a GPU, or on a CPU in bfloat16 if the compiled kernel reads the outputs
    in place. The states are read once, and their gradient is summed within the product."""
    in_kernel = _is_read_by_kernel(hidden_TD)
    rows_TF = project_to_columns(maps, hidden_TD) if hidden_TD.is_cuda or in_kernel else None
    if rows_TF is None:
        return project_separately(maps, hidden_TD)
    widths = [each.out_features for each in maps if isinstance(each, nn.Linear)]
    if in_kernel:
        columns: Sequence[Tensor] = _Columns.apply(rows_TF, widths)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
        return columns
    return torch.split(rows_TF, widths, dim=-1)


def project_to_columns(maps: Sequence[nn.Module], hidden_TD: Tensor) -> Tensor | None:
    """The outputs of all maps side by side, (T, sum of F), in one product; None if some are not plain linear maps."""
    plain = [each for each in maps if is_plain_linear(each) and not _has_hooks(each)]
    if len(plain) < len(maps):
        return None
    weights: list[Tensor] = [each.weight for each in plain]
    biases: list[Tensor] = [each.bias for each in plain if each.bias is not None]
    if len(biases) not in (0, len(maps)):
        return None
    return linear(hidden_TD, torch.cat(weights), torch.cat(biases) if biases else None)


def _has_hooks(part: nn.Module) -> bool:
    """Whether the module must itself be called, because of hooks such as those of the search for non-finite values."""
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


def _is_read_by_kernel(states: Tensor) -> bool:
    """Whether the compiled attention kernel reads the output of a linear map of these states."""
    kernels = loaded_kernels()
    if kernels is None or states.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return False
    dtype = torch.get_autocast_dtype("cpu")
    return dtype is torch.bfloat16 and dtype in kernels.dtypes and has_attention(kernels)


class _Columns(torch.autograd.Function):
    """`torch.split` of the columns; gradients that are adjacent in memory are joined without a copy."""

    @staticmethod
    def forward(ctx: Any, rows_TF: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        return torch.split(rows_TF, list(widths), dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        joined = None if torch.is_grad_enabled() else joined_columns(gradients)
        return torch.cat(gradients, dim=-1) if joined is None else joined, None
