"""Weights in bfloat16, for inference.

Not from a paper. Under autocast each product converts its weights to bfloat16 again; stored in bfloat16, they take half
the bytes to read. Siblings int8.py and low_bit.py use fewer bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertkit.models.operators.matmul import is_plain_linear
from bertkit.models.operators.projected_lstm import ProjectedLstm
from bertkit.models.operators.word_embedding import is_plain_embedding


def cast_linears_to_bf16(model: nn.Module, *, words: bool = False) -> None:
    """Convert the weights of linear maps to bfloat16 once, as autocast would in every batch; not those of ELMo's LSTMs,
    which compute in single precision.

    Args:
        model: used under autocast from now on.
        words: whether to convert embeddings as well, which a head over the vocabulary multiplies with.
    """
    lstms = [part for part in model.modules() if isinstance(part, ProjectedLstm)]
    in_single = {part for lstm in lstms for part in lstm.modules()}
    for part in model.modules():
        if (is_plain_linear(part) and part not in in_single) or (words and is_plain_embedding(part)):
            part.to(torch.bfloat16)


_SUMMED_AT_ONCE = 384
"""Maps with up to this many inputs sum their products in one go for any number of rows."""


def use_fixed_row_blocks(model: nn.Module, *, tokens: int, others: int) -> None:
    """On a CPU with tiles (AMX), make linear maps multiply a fixed number of rows at a time. oneDNN splits long sums
    there depending on the height of a product; with a fixed height, a row's bits do not depend on the number of rows.

    Args:
        model: with weights in bfloat16.
        tokens: rows at a time for maps in layers, which read tokens.
        others: rows at a time for other maps.
    """
    if not torch.cpu._is_amx_tile_supported():
        return
    in_layers = {part for stack in model.modules() if isinstance(stack, nn.ModuleList) for part in stack.modules()}
    for part in model.modules():
        if is_plain_linear(part) and part.in_features > _SUMMED_AT_ONCE:
            part.forward = _FewRows(part, tokens if part in in_layers else others)  # type: ignore[method-assign]


class _FewRows:
    """Replacement of a linear map's `forward` that computes a few rows at a time."""

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        self.linear = linear
        self.rows = rows

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        parts = [functional.linear(part, weight, bias) for part in torch.split(input, self.rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@contextlib.contextmanager
def fast_single_row_matmul() -> Iterator[None]:
    """On a CPU in bfloat16, multiply single rows with torch's own code, which reads weights twice as fast as oneDNN's.

    Measured on an AMD processor with AVX-512 BF16, torch 2.13: 9.5 ms for the 85M weights of GPT-2's layers, 18.8 ms
    with oneDNN, 24.1 ms in float32. With two rows both take 19 ms; with 16, oneDNN takes 30 ms and torch 144 ms.
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # torch's property of a module
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before
