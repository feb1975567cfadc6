"""Word embeddings whose gradient is added into a zero tensor that is reused between backward passes.

Not from a paper. A batch reads some thousand rows of a table of thirty thousand, and torch allocates its gradient as a
new tensor of the table's size. Clearing that memory takes 6 ms of an update of 180 ms at width 256, and 25 ms at width
768. If a model's head shares the table, this gradient is immediately added to the head's; the zero tensor can then be
reused after clearing the rows that were written. Results are bit-identical to torch's, which adds in the same order.

Shapes: T tokens, V vocabulary, E width.
"""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

LEAST_WEIGHTS = 1 << 20
"""Smallest table for which zeros are kept; for smaller ones, new zeros take less time than checking the kept ones."""


class WordEmbedding(nn.Embedding):
    """torch's embedding; see the module docstring for the gradient of its weight on a CPU."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self._zeros = _KeptZeros()

    def forward(self, input: Tensor) -> Tensor:
        if not self._keeps_zeros():
            return super().forward(input)
        rows: Tensor = _Lookup.apply(input, self.weight, self._zeros)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
        return rows

    def _keeps_zeros(self) -> bool:
        weight_VE = self.weight
        return (
            type(weight_VE) is nn.Parameter
            and weight_VE.requires_grad
            and weight_VE.numel() >= LEAST_WEIGHTS
            and weight_VE.dtype is torch.float32
            and weight_VE.device.type == "cpu"
            and not self.sparse
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and forward_ad._current_level < 0  # torch computes forward-mode derivatives
        )


def is_plain_embedding(part: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether this is an embedding, and not a subclass with weights of another kind."""
    return type(part) in (WordEmbedding, nn.Embedding)


class _KeptZeros:
    """A tensor of zeros that is lent to one holder after another, each time with some rows added to it.

    It is lent again only if there are no other references to it, and cleared by rows only if nothing else wrote to it.
    A copy of the model, in this process or another, has its own zeros.
    """

    def __init__(self) -> None:
        self._zeros_VE: Tensor | None = None
        self._holders = 0
        self._version = 0
        self._written_T: Tensor | None = None

    def __deepcopy__(self, memo: object) -> _KeptZeros:
        return _KeptZeros()

    def __reduce__(self) -> tuple[type[_KeptZeros], tuple[()]]:
        return _KeptZeros, ()

    def plus_rows(self, ids_T: Tensor, rows_TE: Tensor, vocab_size: int) -> Tensor | None:
        """Zeros (V, E) with the row of each token added at its word; None while the zeros are still referenced."""
        zeros_VE = self._cleared((vocab_size, rows_TE.shape[1]), rows_TE)
        if zeros_VE is None:
            return None
        zeros_VE.index_add_(0, ids_T, rows_TE)
        # A copy: the caller may overwrite the ids before the next pass.
        self._written_T, self._version = ids_T.to(torch.int64, copy=True), zeros_VE._version
        return zeros_VE

    def _cleared(self, shape: tuple[int, int], like_TE: Tensor) -> Tensor | None:
        if self._zeros_VE is None or self._zeros_VE.shape != shape:
            self._zeros_VE = like_TE.new_zeros(shape)
            self._holders = self._count_holders()
            return self._zeros_VE
        if self._count_holders() > self._holders:
            return None
        if self._zeros_VE._version != self._version or self._written_T is None:
            return self._zeros_VE.zero_()
        return self._zeros_VE.index_fill_(0, self._written_T, 0.0)

    def _count_holders(self) -> int:
        """Number of references to the zeros, from Python and torch, and to their memory from other tensors."""
        assert self._zeros_VE is not None
        memory = torch._C._storage_Use_Count(self._zeros_VE.untyped_storage()._cdata)
        by_torch: int = self._zeros_VE._use_count()  # type: ignore[attr-defined]  # torch's own
        return sys.getrefcount(self._zeros_VE) + by_torch + int(memory)


class _Lookup(torch.autograd.Function):
    """Rows of a table; second derivatives use torch's lookup."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VE: Tensor, zeros: _KeptZeros) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.zeros, ctx.vocab_size = zeros, weight_VE.shape[0]
        return nn.functional.embedding(ids, weight_VE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        (given,) = gradients
        found_VE = None
        if not torch.is_grad_enabled():
            found_VE = ctx.zeros.plus_rows(ids.flatten(), given.reshape(-1, given.shape[-1]), ctx.vocab_size)
        if found_VE is None:
            found_VE = torch.ops.aten.embedding_dense_backward(given, ids, ctx.vocab_size, -1, False)
        return None, found_VE, None
