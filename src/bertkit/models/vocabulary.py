"""The projection onto the vocabulary, and its cross-entropy without keeping the logits.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1: a state is compared with the embedding of every word. With
30,522 words the logits of a batch are the largest tensors of a step; log-softmax, its gradient and theirs are as large
again. Here rows are taken a few at a time: their logits become loss and gradient at once and are let go, so that what
is kept has the size of the states and of the embedding. Only the order of the float sums differs from the plain form.

Shapes: M tokens asked for, D width, E width of the embeddings, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LOGIT_BYTES = 2**25
"""Logits that exist at once. As much as the C library's allocator will keep for the next step: what is larger comes
fresh from the system, page by page, which takes as long as computing it. More rows at once add up the embedding's
gradient fewer times."""


@dataclass(frozen=True)
class VocabularyProjection:
    """Logits that are not computed yet: states times the words' weights, and a bias.

    Attributes:
        states_ME: what is compared with every word.
        weight_VE: each word's weights.
        bias_V: each word's bias; 0 where None.
    """

    states_ME: Tensor
    weight_VE: Tensor
    bias_V: Tensor | None

    def logits(self) -> Tensor:
        """(M, V)."""
        return functional.linear(self.states_ME, self.weight_VE, self.bias_V)

    def cross_entropy(self, id_M: Tensor, *, logit_bytes: int = LOGIT_BYTES) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy in nats, and how many rows have their largest logit at their word.

        Computed in float32 from logits of the precision that autocast asks for.

        Args:
            id_M: the word of each row.
            logit_bytes: how many bytes of float32 logits may exist at once; a row at least.
        """
        device = self.states_ME.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        loss: Tensor
        correct: Tensor
        with torch.autocast(device, enabled=False):
            tensors = (self.states_ME, self.weight_VE, self.bias_V)
            states, weight, bias = (each if each is None or autocast is None else each.to(autocast) for each in tensors)
            rows = max(1, logit_bytes // (4 * self.weight_VE.shape[0]))
            loss, correct = _CrossEntropy.apply(states, weight, bias, id_M, rows, torch.is_grad_enabled())  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
        return loss, correct


class VocabularyHead(nn.Module, ABC):
    """A head that gives every word a logit."""

    @abstractmethod
    def project(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> VocabularyProjection:
        """The logits of these states, not computed yet."""

    def forward(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> Tensor:
        """Logits, (M, V)."""
        return self.project(hidden_MD, word_embedding_VE).logits()


class _CrossEntropy(torch.autograd.Function):
    """Loss and gradients in one go over the rows; backward only scales the gradients."""

    @staticmethod
    def forward(
        ctx: Any, states_ME: Tensor, weight_VE: Tensor, bias_V: Tensor | None, id_M: Tensor, rows: int, learning: bool
    ) -> tuple[Tensor, Tensor]:
        needs_states, needs_weight, needs_bias = (learning and need for need in ctx.needs_input_grad[:3])
        loss = torch.zeros((), dtype=torch.float32, device=states_ME.device)
        correct = torch.zeros((), dtype=torch.int64, device=states_ME.device)
        states_grad = torch.empty_like(states_ME) if needs_states else None
        weight_grad = torch.empty_like(weight_VE) if needs_weight else None
        bias_grad = torch.zeros_like(bias_V) if needs_bias and bias_V is not None else None
        tokens = id_M.numel()
        # Parts of one size: a short last one would pay for a whole addition to the embedding's gradient.
        rows = math.ceil(tokens / max(1, math.ceil(tokens / rows)))
        for first in range(0, tokens, max(1, rows)):
            states, label_m1 = states_ME[first : first + rows], id_M[first : first + rows, None]
            logits = functional.linear(states, weight_VE, bias_V).float()
            top_m1 = logits.amax(dim=-1, keepdim=True)
            label_logit_m1 = logits.gather(1, label_m1)
            # Looking for the first of equal largest is slow, and pays only where the label is among them.
            reached = (label_logit_m1 == top_m1).flatten().nonzero().flatten()
            correct += (logits[reached].argmax(dim=-1) == label_m1.flatten()[reached]).sum()
            probability = torch.softmax(logits, dim=-1)
            # The largest probability is one over the sum of exponentials: at least 1 / V, so that its log is exact.
            loss += (top_m1 - probability.amax(dim=-1, keepdim=True).log() - label_logit_m1).sum()
            if not (needs_states or needs_weight or needs_bias):
                continue
            gradient = probability.scatter_add_(1, label_m1, torch.full_like(top_m1, -1.0)).to(states.dtype)
            if states_grad is not None:
                states_grad[first : first + rows] = gradient @ weight_VE
            if weight_grad is not None:
                weight_grad.addmm_(gradient.t(), states, beta=1 if first else 0)
            if bias_grad is not None:
                bias_grad += gradient.sum(dim=0)
        if weight_grad is not None and not tokens:
            weight_grad.zero_()
        ctx.kept = (states_grad, weight_grad, bias_grad)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept, ctx.kept = ctx.kept, None
        if kept is None:
            raise RuntimeError("the gradients of VocabularyProjection.cross_entropy can be had once")
        # In place, for the weights' is as large as the embedding; so backward runs once.
        scaled = (None if each is None else each.mul_(gradients[0]) for each in kept)
        return (*scaled, None, None, None)
