"""One training step: micro-batches in, one update out.

Losses are sums; the step divides each term once, by its count over all micro-batches, which is known before the first
is computed. The update is therefore the same however the batch is split, and for any number of ranks: each has its
share of the batch, and counts, gradients and sums are added up. Used by every command; not from a paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bertkit.errors import DataError, first_line, is_out_of_memory
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder
from bertkit.ranks import current
from bertkit.training.activation_checkpointing import checkpoint_layers
from bertkit.training.clipping import Clipping
from bertkit.training.compilation import compile_layers, compile_losses
from bertkit.training.engine import Engine
from bertkit.training.gradients import Gradient, TermScale
from bertkit.training.loss_terms import Batch, LossTerms, TermTotal, read_totals
from bertkit.training.out_of_memory import MicroBatchMemoryError
from bertkit.training.placement import Placement


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step.

    Attributes:
        terms: total of each term.
        gradient_norm: norm before clipping.
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
        model: the run's model.
        optimizer: its parameter groups can have `lr_scale`, a factor of the learning rate.
        engine: device and precision.
        clipping: of the model's gradients.
        gradient: computes a micro-batch's part of the gradient.
        placement: where the model's weights are stored.
    """

    model: HeadedModel
    optimizer: torch.optim.Optimizer
    engine: Engine
    clipping: Clipping
    gradient: Gradient
    placement: Placement = field(default_factory=lambda: Placement(current()))

    def __post_init__(self) -> None:
        if self.engine.activation_checkpointing:
            checkpoint_layers(self.model)
        if self.engine.compile:
            compile_layers(self.model)
        compile_losses(self.engine.device, wanted=self.engine.compile)

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
        """Update `number` (from 0) over the micro-batches of one batch; a non-finite one is skipped.

        Args:
            batches: the micro-batches; with several ranks those of this rank's share, which can be empty.
            terms: of the loss.
            learning_rate: of this update.
            number: of this update, from 0.
            skip: whether it was skipped when first computed, and must be skipped again.

        Raises:
            MicroBatchMemoryError: on all ranks, if the memory of one was too small for a micro-batch; only dropout's
                generators have changed.
        """
        train_encoder = any(parameter.requires_grad for parameter in self.model.encoder.parameters())
        if not self.model.training or self.model.encoder.training != train_encoder:  # walks over all modules, twice
            self.model.train()
            self.model.encoder.train(train_encoder)
        ranks = current()
        counts = [terms.counts(batch) for batch in batches]
        whole = ranks.sum_counts([sum(count[term] for count in counts) for term in terms.weights])
        scales = {
            term: TermScale(weight, max(1, count))
            for (term, weight), count in zip(terms.weights.items(), whole, strict=True)
        }
        with self.placement.computing():
            parts = self._add_gradients(batches, terms, scales, number, train_encoder=train_encoder)
            self.placement.sum_gradients(self.clipping.parameters)
            norm = self.clipping.clip()
            early = not skip and ranks.count == 1 and supports_found_inf(self.optimizer, norm.device)
            if early:  # the whole update is queued before waiting for its numbers
                self._apply(
                    learning_rate, unless=not_finite([norm, *(loss.sum for part in parts for loss in part.values())])
                )
            found = ranks.gathered((sum(batch.num_tokens for batch in batches), merged(read_totals(parts))))
            tokens, totals = sum(own for own, _ in found), merged(own for _, own in found)
            gradient_norm = float(norm)
            sums = [gradient_norm, *(total.sum for total in totals.values())]
            finite = not skip and all(map(math.isfinite, sums))
            if finite and not early:
                self._apply(learning_rate)
        self._clear()
        return StepOutcome(totals, gradient_norm, tokens, finite)

    def _apply(self, learning_rate: float, *, unless: Tensor | None = None) -> None:
        """Update the weights.

        Args:
            learning_rate: of groups, before their factor.
            unless: 1 on the device if nothing must be changed, else 0; for optimisers that `supports_found_inf`.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        if unless is None:
            self.optimizer.step()
            return
        self.optimizer.found_inf = unless  # type: ignore[attr-defined]  # torch's own way, of its GradScaler
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.found_inf  # type: ignore[attr-defined]

    def _add_gradients(
        self,
        batches: Sequence[Batch],
        terms: LossTerms[Batch],
        scales: Mapping[str, TermScale],
        number: int,
        *,
        train_encoder: bool,
    ) -> list[Mapping[str, LossSum]]:
        """The gradient of this rank's micro-batches, and the terms of each, still on the device.

        Raises:
            MicroBatchMemoryError: the memory of any rank was exhausted.
        """
        unweighted = {term: replace(scale, weight=0.0) for term, scale in scales.items()}
        parts: list[Mapping[str, LossSum]] = []
        exhausted = ""
        try:
            for batch, counts_too in self.placement.passes(batches):
                own = scales if counts_too else unweighted
                part = self._add_gradient(batch, terms, own, number, train_encoder=train_encoder)
                if counts_too:
                    parts.append(part)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            exhausted = first_line(error)
            if self.placement.is_sharded:  # the others wait for this rank within the pass, so none can retry
                raise DataError(str(MicroBatchMemoryError(exhausted, *_largest(batches)))) from error
        # Only now is the failing micro-batch's memory released: the error's frames referenced it.
        self._require_memory(batches, exhausted)
        return parts

    def _add_gradient(
        self,
        batch: Batch,
        terms: LossTerms[Batch],
        scales: Mapping[str, TermScale],
        number: int,
        *,
        train_encoder: bool,
    ) -> Mapping[str, LossSum]:
        """A micro-batch's part of the gradient, and its terms."""
        moved = batch.to(self.engine.device)

        def loss(recorder: Recorder | None) -> Mapping[str, LossSum]:
            with self.engine.autocast():
                return self.placement.losses(
                    lambda: terms.losses(self.model, moved, recorder, train_encoder=train_encoder)
                )

        return self.gradient.add(loss, moved, scales, number)

    def _require_memory(self, batches: Sequence[Batch], exhausted: str) -> None:
        """Raise MicroBatchMemoryError on all ranks if any ran out of memory; the message gives the reason."""
        ranks = current()
        if not any(ranks.sum_counts([int(bool(exhausted))])):
            return
        self._clear()
        if self.engine.device.type == "cuda":
            torch.cuda.empty_cache()
        found = ranks.gathered((exhausted, *_largest(batches)))
        raise MicroBatchMemoryError(
            next(reason for reason, _, _ in found if reason),
            tokens=max(tokens for _, tokens, _ in found),
            items=max(items for _, _, items in found),
        )

    def _clear(self) -> None:
        self.clipping.clear()
        self.optimizer.zero_grad(set_to_none=True)


def _largest(batches: Sequence[Batch]) -> tuple[int, int]:
    """The tokens and the parts of the largest micro-batch."""
    tokens = max((batch.num_tokens for batch in batches), default=0)
    return tokens, max((batch.num_items for batch in batches), default=0)


def supports_found_inf(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether an optimiser can skip an update by a flag on the device, without synchronising a GPU."""
    is_fused = isinstance(optimizer, torch.optim.Adam) and all(group["fused"] for group in optimizer.param_groups)
    return is_fused and device.type == "cuda"


def not_finite(numbers: Sequence[Tensor]) -> Tensor:
    """1 if any of these numbers is not finite, else 0; on their device."""
    on_device = [number.detach().to(numbers[0].device, torch.float32) for number in numbers]
    return 1 - torch.stack(on_device).isfinite().all().float()


def merged(parts: Iterable[Mapping[str, TermTotal]]) -> dict[str, TermTotal]:
    """Each term's total over all micro-batches, or over all ranks."""
    totals: dict[str, TermTotal] = {}
    for found in parts:
        for term, total in found.items():
            totals[term] = totals[term] + total if term in totals else total
    return totals


@torch.no_grad()
def evaluate(
    model: HeadedModel, terms: LossTerms[Batch], batches: Iterable[Batch], engine: Engine
) -> dict[str, TermTotal]:
    """Each term's total over these batches, without dropout; all ranks get the same batches and share the work."""
    model.eval()
    ranks = current()
    parts: list[Mapping[str, LossSum]] = []
    for number, batch in enumerate(batches):
        if number % ranks.count != ranks.rank:
            continue
        with engine.autocast():
            parts.append(terms.losses(model, batch.to(engine.device)))
    none = {term: TermTotal(0.0, 0, 0) for term in terms.weights}
    return merged(ranks.gathered(merged([none, *read_totals(parts)])))
