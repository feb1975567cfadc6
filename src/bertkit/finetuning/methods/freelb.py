"""FreeLB: all weights are trained on word embeddings that are perturbed, within a ball, to increase the loss.

Zhu et al. 2020, arXiv:1909.11764, algorithm 1. K passes over a batch increase the loss by a perturbation of the word
embeddings. The weights' gradient is the mean over the passes, so an update costs K times a plain one.

- The norm, the ascent and the ball are per sequence: over its tokens, special tokens included, and all dimensions.
- Dropout has the same mask in all passes of a batch (section 3.3): each starts from the same generator state.
- The last perturbation, which algorithm 1 computes but does not use, is left out, as in the authors' code.
- The random start is a function of seed, step and the sequence's content, so the batch may be split in any way.

Shapes: T packed tokens, B sequences, E width of the word embeddings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch, sequence_keys
from bertkit.errors import UsageError
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder
from bertkit.settings import UnreadKey
from bertkit.tasks.base import TaskBatch
from bertkit.training.gradients import Gradient, LossOf, TermScale, backward, detached, scaled_total
from bertkit.training.method import Method

WORDS = "hook_embed"
"""The hook point at which every family's word embeddings can be edited."""


class FreeLb(Method):
    """Train every weight on adversarially perturbed word embeddings."""

    name: Literal["freelb"] = "freelb"
    ascent_steps: int = Field(
        3, ge=1, description="K: number of ascent steps per batch; an update costs K times as much."
    )
    step_size: float = Field(0.06, ge=0, description="Alpha: length of one ascent step.")
    epsilon: float | None = Field(
        0.14, gt=0, description="Maximum Frobenius norm of a sequence's perturbation; null: no bound."
    )
    start: float | None = Field(
        None,
        ge=0,
        description="Bound of the random initial perturbation, uniform in +-start / sqrt(tokens x width); null:"
        " epsilon, as in the paper, or 0 if there is none; 0: no initial perturbation.",
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.ascent_steps == 1:
            yield UnreadKey("step_size", "method.ascent_steps is 1: there is no ascent after the only pass")

    def gradient(self, seed: int) -> Gradient:
        return FreeLbGradient(self, seed)

    @property
    def start_bound(self) -> float:
        """The effective bound of the random start."""
        return (self.epsilon or 0.0) if self.start is None else self.start


class FreeLbGradient(Gradient):
    """The mean gradient over the passes of an ascending perturbation with seeded random starts."""

    def __init__(self, settings: FreeLb, seed: int) -> None:
        self.settings = settings
        self.seed = seed
        self.passes = settings.ascent_steps

    def add(self, loss: LossOf, batch: TaskBatch, scales: Mapping[str, TermScale], step: int) -> dict[str, LossSum]:
        """As in `Gradient`; the returned loss is the mean over the passes, the accuracy that of the first."""
        perturbation = Perturbation(self.settings, batch.packed, seed=self.seed, step=step)
        recorder = Recorder(edits={WORDS: perturbation})
        found: list[dict[str, LossSum]] = []
        device = batch.packed.ids_T.device
        for number in range(self.passes):
            is_last = number + 1 == self.passes
            with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=not is_last):
                losses = loss(recorder)
                backward(scaled_total(losses, scales, self.passes))
            found.append(detached(losses))
            if not is_last:
                perturbation.climb()
        return {
            term: LossSum(self._mean([each[term].sum for each in found]), first.count, first.correct)
            for term, first in found[0].items()
        }

    def _mean(self, sums: Sequence[Tensor]) -> Tensor:
        """The mean over the passes, in double precision."""
        total = sums[0].double()
        for each in sums[1:]:
            total = total + each
        return total / self.passes


class Perturbation:
    """The perturbation that is added to the word embeddings of one batch.

    Args:
        settings: of the ascent.
        batch: the micro-batch to perturb.
        seed, step: of the random start.

    Attributes:
        delta_TE: the perturbation; None before the first pass.
    """

    def __init__(self, settings: FreeLb, batch: PackedBatch, *, seed: int, step: int) -> None:
        self.settings = settings
        self.batch = batch
        self.key = f"{seed}/freelb/{step}/"
        lengths_B = batch.sequences.cu_seqlens_B1.diff().long()
        self.num_sequences = lengths_B.numel()
        sequence_B = torch.arange(self.num_sequences, device=lengths_B.device)
        self.sequence_T = torch.repeat_interleave(sequence_B, lengths_B, output_size=batch.num_tokens)
        self.delta_TE: Tensor | None = None

    def __call__(self, words_TE: Tensor) -> Tensor:
        """The perturbed embeddings; used as an edit of a recorder."""
        if self.delta_TE is None:
            self._set(self._start(words_TE))
        assert self.delta_TE is not None
        return words_TE + self.delta_TE

    def climb(self) -> None:
        """Take one step along the gradient of the last pass, and project back into the ball.

        Raises:
            UsageError: the encoder's word embeddings cannot be perturbed.
        """
        if self.delta_TE is None or self.delta_TE.grad is None:
            raise UsageError(f"method.name: freelb perturbs word embeddings, but the encoder has no hook {WORDS!r}")
        gradient_TE = self.delta_TE.grad
        norm_B1 = self.norms(gradient_TE)
        # A sequence on which the loss does not depend is not moved.
        factor_B1 = torch.where(norm_B1 > 0, self.settings.step_size / norm_B1, torch.zeros_like(norm_B1))
        moved_TE = self.delta_TE.detach() + gradient_TE * factor_B1[self.sequence_T].to(gradient_TE.dtype)
        self._set(moved_TE)

    def norms(self, table_TE: Tensor) -> Tensor:
        """The Frobenius norm of each sequence's rows, (B, 1), in float64."""
        squares_T = table_TE.detach().double().square().sum(dim=1)
        sums_B = squares_T.new_zeros(self.num_sequences).index_add(0, self.sequence_T, squares_T)
        return sums_B.sqrt()[:, None]

    def _set(self, delta_TE: Tensor) -> None:
        epsilon = self.settings.epsilon
        if epsilon is not None:
            norm_B1 = self.norms(delta_TE)
            scale_B1 = torch.where(norm_B1 > epsilon, epsilon / norm_B1, torch.ones_like(norm_B1))
            delta_TE = delta_TE * scale_B1[self.sequence_T].to(delta_TE.dtype)
        self.delta_TE = delta_TE.detach().requires_grad_(self.settings.ascent_steps > 1)

    def _start(self, words_TE: Tensor) -> Tensor:
        """Uniform in +-start / sqrt(elements of the sequence)."""
        bound, width = self.settings.start_bound, words_TE.shape[1]
        if bound == 0:
            return torch.zeros_like(words_TE)
        lengths = self.batch.sequences.cu_seqlens_B1.diff().tolist()
        parts = []
        for key, length in zip(sequence_keys(self.batch), lengths, strict=True):
            digest = hashlib.sha256(self.key.encode() + key).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            limit = bound * (length * width) ** -0.5
            parts.append(torch.empty(length, width).uniform_(-limit, limit, generator=generator))
        return torch.cat(parts).to(words_TE)
