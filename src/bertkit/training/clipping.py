"""Clipping the gradient by its global norm; `RowClipping` handles only the embedding rows that a batch reads.

Pascanu et al. 2013, arXiv:1211.5063, algorithm 1, as in torch. A batch of short sentences reads a few hundred of thirty
thousand words, yet torch's dense gradient of the table is a new tensor of the table's size in every step, whose pages
the system must clear: on a CPU this costs more than the fused AdamW of a small model. `RowClipping` keeps one such
tensor and measures, scales, writes and clears only the rows that were read. The optimiser gets the same dense gradient.

Shapes: M tokens read, R different words, V vocabulary, E width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bertkit.models.headed import HeadedModel

_EPSILON = 1e-6
"""Added to the norm, as in torch.nn.utils.clip_grad_norm_."""


class Clipping:
    """Clips gradients by their global norm.

    Args:
        parameters: in the order in which their norms are summed.
        max_norm: maximum norm over all parameters; None: only measure it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> None:
        self.parameters = list(parameters)
        self.max_norm = math.inf if max_norm is None else max_norm

    def clip(self) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before scaling, a
        number on their device, without synchronising."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)

    def clear(self) -> None:
        """Reset after an update."""


class RowClipping(Clipping):
    """Clips the gradients of a model, using a sparse gradient for its word embeddings.

    Args:
        model: its word embeddings get sparse gradients from here on, if they are in CPU memory.
        max_norm: maximum norm over all gradients; None: only measure it.
    """

    def __init__(self, model: HeadedModel, max_norm: float | None) -> None:
        super().__init__(model.parameters(), max_norm)
        table = model.encoder.word_embedding
        table.sparse = self._has_sparse_gradient = table.weight.device.type == "cpu"
        self._table_VE = table.weight
        self._gradient_VE: Tensor | None = None
        self._word_R: Tensor | None = None

    def clip(self) -> Tensor:
        """Scale all gradients and make the word embeddings' dense; returns the norm before scaling."""
        if not self._has_sparse_gradient:
            return super().clip()
        found = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        gradients = [gradient for _, gradient in found if not gradient.is_sparse]
        rows = [_summed(gradient) for _, gradient in found if gradient.is_sparse]
        assert all(parameter is self._table_VE for parameter, gradient in found if gradient.is_sparse)
        gradients += [rows_RE for _, rows_RE in rows]
        norm = torch.nn.utils.get_total_norm(gradients)
        factor = self.max_norm / (float(norm) + _EPSILON)
        if factor < 1:
            torch._foreach_mul_(gradients, factor)
        for self._word_R, rows_RE in rows:
            if self._gradient_VE is None:
                self._gradient_VE = torch.zeros_like(self._table_VE)
            self._table_VE.grad = self._gradient_VE.index_copy_(0, self._word_R, rows_RE)
        return norm

    def clear(self) -> None:
        if self._gradient_VE is not None and self._word_R is not None:
            self._gradient_VE.index_fill_(0, self._word_R, 0.0)
        self._table_VE.grad = self._word_R = None


def _summed(gradient_VE: Tensor) -> tuple[Tensor, Tensor]:
    """The words of a sparse gradient, (R,), and their rows, (R, E), each the sum over the tokens that read it."""
    word_M, rows_ME = gradient_VE._indices()[0], gradient_VE._values()
    word_R, place_M = torch.unique(word_M, return_inverse=True)
    return word_R, rows_ME.new_zeros(word_R.numel(), rows_ME.shape[1]).index_add_(0, place_M, rows_ME)
