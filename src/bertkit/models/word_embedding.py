"""Embeddings of words, whose gradient is added into zeros that are kept from one backward pass to the next.

Nothing here follows a paper. A batch reads some thousand rows of a table of thirty thousand, and torch makes its
gradient in a new tensor of the table's size: clearing its memory takes 6 ms of an update of 180 at a width of 256, 25
ms at 768. Of a model whose head shares the table this gradient is added to that of the head at once, so that the zeros
can be used again when the rows that were written are cleared. The same bits as torch's, which adds in the same order.

Shapes: T tokens, V vocabulary, E width.
"""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

LEAST_WEIGHTS = 1 << 20
"""Of a table. The zeros of a smaller one take less time than looking for those that are kept."""


class WordEmbedding(nn.Embedding):
    """torch's embedding; see the module's text for the gradient of its weight on a processor."""

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
            and forward_ad._current_level < 0  # forward-mode derivatives are torch's
        )


def is_plain_embedding(part: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether this is an embedding and no subclass with weights of another kind."""
    return type(part) in (WordEmbedding, nn.Embedding)


class _KeptZeros:
    """A tensor of zeros that is lent to one holder after another, who each get it with some rows added to it.

    It is lent again only when nobody else holds it, and cleared by rows only if nobody else wrote to it. A copy of the
    model, in this process or another, has zeros of its own.
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
        """Zeros (V, E) to which the row of each token is added at its word; None while a holder has the last ones."""
        zeros_VE = self._cleared((vocab_size, rows_TE.shape[1]), rows_TE)
        if zeros_VE is None:
            return None
        zeros_VE.index_add_(0, ids_T, rows_TE)
        # A copy: the caller may write other words into these before the next pass.
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
        """References to the zeros, by Python and by torch, and to their memory by other tensors."""
        assert self._zeros_VE is not None
        memory = torch._C._storage_Use_Count(self._zeros_VE.untyped_storage()._cdata)
        by_torch: int = self._zeros_VE._use_count()  # type: ignore[attr-defined]  # torch's own
        return sys.getrefcount(self._zeros_VE) + by_torch + int(memory)


class _Lookup(torch.autograd.Function):
    """Rows of a table; the second derivative is that of torch's lookup."""

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
