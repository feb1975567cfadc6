"""Weighted sums of a layer's input and the outputs of all layers before it.

Pagliardini et al. 2024, DenseFormer, arXiv:2402.02622, section 3. With torch's own operations, the product with each
factor is computed again for its gradient; here this is a dot product, which halves the time (one core, 25 states).

Shapes: S states of one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _WeightedSum(torch.autograd.Function):
    """The sum of states, each with a factor; neither pass allocates a tensor as large as all states together."""

    @staticmethod
    def forward(ctx: Any, weight_S: Tensor, *states: Tensor) -> Tensor:
        ctx.save_for_backward(weight_S, *states)
        ctx.save_for_forward(weight_S, *states)
        total = states[0] * weight_S[0]
        for weight, state in zip(weight_S[1:], states[1:], strict=True):
            total.addcmul_(state, weight)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        weight_S, *states = ctx.saved_tensors
        (gradient,) = gradients
        products = [torch.dot(state.flatten(), gradient.flatten()) for state in states]
        return torch.stack(products).to(weight_S.dtype), *(gradient * weight for weight in weight_S)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        weight_S, *states = ctx.saved_tensors
        of_weights_S, *of_states = tangents
        total = torch.zeros_like(states[0])
        for number, (state, of_state) in enumerate(zip(states, of_states, strict=True)):
            if of_state is not None:
                total.addcmul_(of_state, weight_S[number])
            if of_weights_S is not None:
                total.addcmul_(state, of_weights_S[number])
        return total


def weighted_sum(weight_S: Tensor, states: Sequence[Tensor]) -> Tensor:
    """The sum of S tensors of the same shape, weighted by these factors."""
    total: Tensor = _WeightedSum.apply(weight_S, *states)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    return total
