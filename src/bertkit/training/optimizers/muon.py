"""Muon: momentum with all singular values close to one for the layers' matrices; AdamW for the rest.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/ (the rule; AdamW for embeddings, heads, norms and
biases). Liu et al. 2025, arXiv:2502.16982, section 2.2 (weight decay, and updates of the size of AdamW's). Both rules
are torch's, `torch.optim.Muon` (stacked_muon.py) and `torch.optim.AdamW`; here they are combined into one optimiser.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import nn

from bertkit.errors import UsageError
from bertkit.models.encoder import Encoder
from bertkit.training.optimizers.base import Betas, OptimizerConfig, decay_groups, loss_of
from bertkit.training.optimizers.stacked_muon import StackedMuon


class MuonConfig(OptimizerConfig):
    """Orthogonalised momentum on the matrices of the encoder's layers, AdamW elsewhere."""

    name: Literal["muon"] = "muon"
    can_shard: ClassVar[bool] = False
    later_fields: ClassVar[frozenset[str]] = OptimizerConfig.later_fields | {"iterations"}
    momentum: float = Field(0.95, ge=0, lt=1, description="Momentum of the matrices' gradients, in Nesterov's form.")
    adjustment: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="Factor of the learning rate of an A x B matrix: 0.2 sqrt(max(A, B)), which suits AdamW's"
        " learning rates, or, as first published, sqrt(max(1, A / B)).",
    )
    matrix_rate: float = Field(1.0, gt=0, description="The matrices' learning rate as a multiple of the schedule's.")
    iterations: int = Field(
        5,
        ge=1,
        lt=100,
        description="Iterations of the Newton-Schulz method, which makes a matrix orthogonal. With small batches"
        " they cost as much as the model (`--plan`).",
    )
    betas: Betas = Field((0.9, 0.999), description="AdamW's decay rates of the running means.")
    eps: float = Field(1e-6, gt=0, description="AdamW's epsilon, added to the square root of the second moment.")

    @property
    def width_power(self) -> float:
        """An orthogonal update has a spectral norm of 1 at every width; 0.2 sqrt(max(A, B)) grows with its root."""
        return 0.5 if self.adjustment == "match_rms_adamw" else 0.0

    def update_flops(self, model: nn.Module) -> float:
        """Operations of the iterations, each with three products of m x n and m x m matrices (m <= n)."""
        sides = [sorted(matrix.shape) for matrix in hidden_matrices(model)]
        return self.iterations * sum(4.0 * m * m * n + 2.0 * m**3 for m, n in sides)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Three groups: matrices, other decayed parameters, and those without decay.

        Raises:
            UsageError: the model has no layers with matrices.
        """
        hidden = {id(matrix) for matrix in hidden_matrices(model)}
        decayed, kept = decay_groups(model)
        matrices = [parameter for parameter in decayed if id(parameter) in hidden]
        if not matrices:
            raise UsageError(
                "optimisation.optimizer.name: muon needs an encoder with linear maps in its layers, but this model has"
                " none; use adamw"
            )
        others = [parameter for parameter in decayed if id(parameter) not in hidden]
        muon = StackedMuon(
            [{"params": matrices, "lr_scale": self.matrix_rate}],
            lr=0.0,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            adjust_lr_fn=self.adjustment,
            ns_steps=self.iterations,
        )
        adamw = torch.optim.AdamW(
            [
                {"params": others, "weight_decay": self.weight_decay},
                {"params": kept, "weight_decay": self.decay_of_others},
            ],
            lr=0.0,
            betas=self.betas,
            eps=self.eps,
            fused=True,
        )
        return JointOptimizer([muon, adamw])


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The linear maps in the layers of the model's encoders, without embeddings and their projections and heads."""
    encoders = [part for part in model.modules() if isinstance(part, Encoder)]
    stacks = [part for encoder in encoders for part in encoder.modules() if isinstance(part, nn.ModuleList)]
    maps = [part for stack in stacks for part in stack.modules() if isinstance(part, nn.Linear)]
    return list(dict.fromkeys(cast(nn.Parameter, part.weight) for part in maps))


class JointOptimizer(torch.optim.Optimizer):
    """Several optimisers over disjoint parameters, combined into one, with all their groups and a single state.

    A group's `part` is the number of its optimiser. The parts get groups and state at each step, so that changes made
    here (setting a learning rate, splitting a group, loading a state) apply to them.
    """

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = parts
        groups = [{**group, "part": number} for number, part in enumerate(parts) for group in part.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's own
        loss = loss_of(closure)
        for number, part in enumerate(self._parts):
            part.param_groups = [group for group in self.param_groups if group["part"] == number]
            part.state = self.state
            part.step()
        return loss
