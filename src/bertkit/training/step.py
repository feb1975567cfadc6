"""One training step: micro-batches in, one update out.

Losses are sums; the step divides each term once, by its count over all micro-batches, which is known before the first
is computed. So the update is the same however the batch is cut. Serves every objective; nothing here follows a paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.objectives import TeacherSession
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import encode
from bertkit.training.engine import Engine


@dataclass(frozen=True)
class TermTotal:
    """One term over a whole batch: summed loss in nats, predictions, how many were right, and other numbers of them."""

    sum: float
    count: int
    correct: int
    counters: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, part: LossSum) -> TermTotal:
        """One micro-batch's, read off the device."""
        counters = {name: int(number) for name, number in part.counters.items()}
        return cls(float(part.sum.detach()), part.count, int(part.correct), counters)

    def __add__(self, other: TermTotal) -> TermTotal:
        names = dict.fromkeys([*self.counters, *other.counters])
        counters = {name: self.counters.get(name, 0) + other.counters.get(name, 0) for name in names}
        return TermTotal(self.sum + other.sum, self.count + other.count, self.correct + other.correct, counters)

    @property
    def mean(self) -> float:
        return self.sum / max(1, self.count)

    @property
    def accuracy(self) -> float:
        return self.correct / max(1, self.count)


@dataclass(frozen=True)
class StepOutcome:
    """What a step did.

    Attributes:
        terms: each objective's total.
        gradient_norm: before clipping.
        tokens: real tokens read.
        finite: false where loss or gradient was not, and the update was skipped.
    """

    terms: Mapping[str, TermTotal]
    gradient_norm: float
    tokens: int
    finite: bool


def weighted_loss(terms: Mapping[str, TermTotal], objectives: Sequence[Objective]) -> float:
    """The total loss: each term's mean times its weight."""
    return sum(objective.weight * terms[objective.term].mean for objective in objectives)


class Stepper:
    """Computes gradients and applies updates."""

    def __init__(
        self, model: HeadedModel, optimizer: torch.optim.Optimizer, engine: Engine, *, clip_norm: float | None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.engine = engine
        self.clip_norm = math.inf if clip_norm is None else clip_norm
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def step(
        self,
        batches: Sequence[PackedBatch],
        objectives: Sequence[Objective],
        rate: float,
        guide: TeacherSession | None = None,
    ) -> StepOutcome:
        """One update at this learning rate, over the micro-batches of one batch, beside the teacher of a student."""
        self.model.train()
        counts = {objective.term: max(1, sum(objective.count(batch) for batch in batches)) for objective in objectives}
        totals: dict[str, TermTotal] = {}
        for batch in batches:
            loss, terms = self._forward(batch.to(self.engine.device), objectives, counts, guide)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves Tensor.backward untyped
            totals = {name: totals[name] + term if name in totals else term for name, term in terms.items()}
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm))
        finite = update_if_finite(self.optimizer, rate, norm, totals)
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(totals, norm, sum(batch.num_tokens for batch in batches), finite)

    def _forward(
        self,
        batch: PackedBatch,
        objectives: Sequence[Objective],
        counts: Mapping[str, int],
        guide: TeacherSession | None,
    ) -> tuple[Tensor, dict[str, TermTotal]]:
        with self.engine.autocast():
            parts = losses(self.model, objectives, batch, guide)
        loss = torch.stack([parts[each.term].sum * (each.weight / counts[each.term]) for each in objectives]).sum()
        return loss, {term: TermTotal.of(part) for term, part in parts.items()}


def update_if_finite(
    optimizer: torch.optim.Optimizer, rate: float, gradient_norm: float, totals: Mapping[str, TermTotal]
) -> bool:
    """Apply the gradients that are there, unless their norm or a term is not finite; returns whether it did.

    Args:
        optimizer: a group of its parameters may have `lr_scale`, its factor of the rate.
        rate: learning rate.
        gradient_norm: before clipping.
        totals: the terms of the loss.
    """
    if not math.isfinite(gradient_norm) or not all(math.isfinite(total.sum) for total in totals.values()):
        return False
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
    optimizer.step()
    return True


def losses(
    model: HeadedModel, objectives: Sequence[Objective], batch: PackedBatch, guide: TeacherSession | None = None
) -> dict[str, LossSum]:
    """Each objective's term over one micro-batch, by its name."""
    readings = encode(model, objectives, batch, guide)
    return {objective.term: readings[objective.term].loss(objective) for objective in objectives}


@torch.no_grad()
def evaluate(
    model: HeadedModel,
    objectives: Sequence[Objective],
    batches: Iterable[PackedBatch],
    engine: Engine,
    guide: TeacherSession | None = None,
) -> dict[str, TermTotal]:
    """Each objective's total over these batches, without dropout."""
    model.eval()
    totals = {objective.term: TermTotal(0.0, 0, 0) for objective in objectives}
    for batch in batches:
        moved = batch.to(engine.device)
        with engine.autocast():
            for term, part in losses(model, objectives, moved, guide).items():
                totals[term] += TermTotal.of(part)
    return totals
