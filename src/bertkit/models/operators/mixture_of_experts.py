"""A mixture of experts: each token passes through a few of several feed-forward layers, which a router chooses.

Shazeer et al. 2017, arXiv:1701.06538, section 2; no token is dropped (Gale et al. 2022, MegaBlocks, arXiv:2211.15841).
The router's probabilities are those of all experts, so the weights of the chosen ones sum to less than one, and one
bias is added behind all experts, as in nomic-ai/contrastors, src/contrastors/layers/moe.py. There is no loss that
balances the experts.

Shapes: T packed tokens, D width, F width of the experts, E experts, K experts of a token, M tokens of one expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertkit.models.layers import Activation, FeedForward
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Scope

_ROWS = 64
"""Outside training, an expert's rows are filled up to a multiple of this, since products of few rows are computed by
other kernels, and a text's vector must not depend on other texts (bertkit.inference.independent_batches)."""


class Router(Linear):
    """A linear map in single precision, since rounding would choose other experts."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return functional.linear(input.float(), self.weight)


class MixtureOfExperts(nn.Module):
    """The sum of a token's experts, weighted by the router's probabilities.

    Args:
        width: D.
        inner_width: F.
        activation: of the experts.
        experts: E.
        per_token: K.
    """

    def __init__(self, width: int, inner_width: int, activation: Activation, *, experts: int, per_token: int) -> None:
        super().__init__()
        self.router = Router(width, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(width, inner_width, activation, bias=False) for _ in range(experts))
        self.bias = nn.Parameter(torch.zeros(width))
        self.per_token = per_token

    @property
    def idle_weights(self) -> int:
        """Weights of linear maps that a token does not pass through."""
        count = sum(weight.numel() for weight in self.experts.parameters())
        return count * (len(self.experts) - self.per_token) // len(self.experts)

    def forward(self, hidden_TD: Tensor, scope: Scope) -> Tensor:
        """(T, D) to (T, D). Point: `hook_expert_weights`, the router's probabilities, (T, E)."""
        weight_TE = scope.tap("hook_expert_weights", self.router(hidden_TD).softmax(dim=-1))
        weight_TK, expert_TK = weight_TE.topk(self.per_token, dim=-1)
        mixed_TD = torch.zeros_like(hidden_TD)
        for number, expert in enumerate(self.experts):
            row_M, place_M = torch.where(expert_TK == number)
            own_MD = hidden_TD.index_select(0, row_M)
            missing = 0 if self.training else -len(own_MD) % _ROWS
            fed_MD = expert(functional.pad(own_MD, (0, 0, 0, missing)), Scope(None, ""))[: len(own_MD)]
            weighted_MD = fed_MD * weight_TK[row_M, place_M, None]
            mixed_TD = mixed_TD.index_add(0, row_M, weighted_MD.to(mixed_TD.dtype))
        return mixed_TD + self.bias
