"""A loss and a plain form of it, compared with all their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bertkit.models.headed import HeadedModel


def gradients_of_both(
    model: HeadedModel,
    hidden_TD: Tensor,
    ours: Callable[[Tensor], Tensor],
    plain: Callable[[Tensor], Tensor],
    *,
    rtol: float,
    atol: float,
) -> dict[str, Tensor | None]:
    """The gradients of `ours` for the parameters, and for the states under `states`; both losses are functions of the
    states, and they and their gradients must agree."""
    results = []
    for loss_of in (ours, plain):
        states_TD = hidden_TD.clone().requires_grad_()
        model.zero_grad()
        loss = loss_of(states_TD)
        loss.backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        results.append((loss.detach(), {**gradients, "states": states_TD.grad}))
    (loss, found), (expected, expected_gradients) = results
    torch.testing.assert_close(loss, expected)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=rtol, atol=atol, msg=name)
    return found
