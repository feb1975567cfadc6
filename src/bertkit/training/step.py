"""One training step: micro-batches in, one update out.

Losses are sums; the step divides each term once, by its count over all micro-batches, which is known before the first
is computed. So the update is the same however the batch is cut, and by however many ranks it is computed: each has its
share of the batch, and counts, gradients and sums are added up. Serves every command; nothing here follows a paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder
from bertkit.ranks import current
from bertkit.training.clipping import Clipping
from bertkit.training.engine import Engine
from bertkit.training.gradients import Gradient, TermScale
from bertkit.training.loss_terms import Batch, LossTerms, TermTotal
from bertkit.training.placement import Placement


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step.

    Attributes:
        terms: the total of each.
        gradient_norm: before clipping.
        tokens: real tokens read.
        finite: false if loss or gradient was not finite and the update was skipped.
    """

    terms: Mapping[str, TermTotal]
    gradient_norm: float
    tokens: int
    finite: bool


@dataclass
class Step:
    """Computes gradients and applies updates.

    Attributes:
        model: the run's.
        optimizer: a group of its parameters may have `lr_scale`, a factor of the learning rate.
        engine: device and precision.
        clipping: of the model's gradients.
        gradient: computes a micro-batch's part of them.
        placement: where the model's weights lie.
    """

    model: HeadedModel
    optimizer: torch.optim.Optimizer
    engine: Engine
    clipping: Clipping
    gradient: Gradient
    placement: Placement = field(default_factory=lambda: Placement(current()))

    @classmethod
    def plain(
        cls,
        model: HeadedModel,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        clip_norm: float | None = None,
        placement: Placement | None = None,
    ) -> Step:
        """The step with the plain gradient and torch's clipping."""
        placement = placement or Placement(current())
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return cls(model, optimizer, engine, placement.clipping(parameters, clip_norm), Gradient(), placement)

    def update(
        self,
        batches: Sequence[Batch],
        terms: LossTerms[Batch],
        learning_rate: float,
        number: int = 0,
        *,
        skip: bool = False,
    ) -> StepOutcome:
        """Update `number` (from 0), over the micro-batches of one batch; one that is not finite is skipped.

        Args:
            batches: the micro-batches, of several ranks those of this one's share: there may be none.
            terms: of the loss.
            learning_rate: of this update.
            number: of this update, from 0.
            skip: whether it was skipped when it was first made, and so is again.
        """
        self.model.train()
        train_encoder = any(parameter.requires_grad for parameter in self.model.encoder.parameters())
        self.model.encoder.train(train_encoder)
        ranks = current()
        counts = [terms.counts(batch) for batch in batches]
        whole = ranks.sum_counts([sum(count[term] for count in counts) for term in terms.weights])
        scales = {
            term: TermScale(weight, max(1, count))
            for (term, weight), count in zip(terms.weights.items(), whole, strict=True)
        }
        unweighted = {term: replace(scale, weight=0.0) for term, scale in scales.items()}
        totals: dict[str, TermTotal] = {}
        with self.placement.computing():
            for batch, counts_too in self.placement.passes(batches):
                moved = batch.to(self.engine.device)

                def loss(recorder: Recorder | None, moved: Batch = moved) -> Mapping[str, LossSum]:
                    with self.engine.autocast():
                        return self.placement.losses(
                            lambda: terms.losses(self.model, moved, recorder, train_encoder=train_encoder)
                        )

                parts = self.gradient.add(loss, moved, scales if counts_too else unweighted, number)
                for term, part in parts.items() if counts_too else ():
                    totals[term] = totals[term] + part if term in totals else part
            self.placement.sum_gradients(self.clipping.parameters)
            tokens, totals = added(ranks.gathered((sum(batch.num_tokens for batch in batches), totals)))
            norm = self.clipping.clip()
            finite = not skip and math.isfinite(norm) and all(math.isfinite(total.sum) for total in totals.values())
            if finite:
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate * group.get("lr_scale", 1.0)
                self.optimizer.step()
        self.clipping.clear()
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(totals, norm, tokens, finite)


def added(parts: Sequence[tuple[int, dict[str, TermTotal]]]) -> tuple[int, dict[str, TermTotal]]:
    """Tokens, and each term's total, of all ranks together."""
    first, *others = parts
    tokens, totals = first
    for more, part in others:
        tokens += more
        totals = {**totals, **{term: totals[term] + total if term in totals else total for term, total in part.items()}}
    return tokens, totals


@torch.no_grad()
def evaluate(
    model: HeadedModel, terms: LossTerms[Batch], batches: Iterable[Batch], engine: Engine
) -> dict[str, TermTotal]:
    """Each term's total over these batches, without dropout; the same batches on every rank, which share the work."""
    model.eval()
    ranks = current()
    totals = {term: TermTotal(0.0, 0, 0) for term in terms.weights}
    for number, batch in enumerate(batches):
        if number % ranks.count != ranks.rank:
            continue
        with engine.autocast():
            for term, part in terms.losses(model, batch.to(engine.device)).items():
                totals[term] += TermTotal.of(part)
    _, totals = added([(0, own) for own in ranks.gathered(totals)])
    return totals
