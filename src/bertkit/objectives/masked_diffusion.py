"""Masked diffusion: mask a random share of each sample's tokens, and predict them all.

Nie et al. 2025, LLaDA, arXiv:2502.09992, section 2.2 and algorithm 1: with t uniform in (0, 1), every token is masked
with probability t, and the summed cross-entropy over t, divided by the tokens of the sequence, is in expectation an
upper bound of the negative log-likelihood per token (Sahoo et al. 2024, MDLM, arXiv:2406.07524; Ou et al. 2024,
arXiv:2406.03736). As in the code in GUIDELINES.md of ML-GSAI/LLaDA, the rate is p = (1 - eps) t + eps with eps = 1e-3,
so no weight exceeds 1000. Sibling masked_lm.py masks the same share of every sample and weights predictions equally.

Quirks left: LLaDA truncates one sample in a hundred to a random length, and its separators can be masked.

Shapes: T packed tokens, B sequences, M predicted tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.objectives.base import CompanionObjective, Objective, TokenPrediction
from bertkit.text.tokenizer import Tokenizer

_WEIGHT = "weight"


class MaskedDiffusion(TokenPrediction):
    """Mask every ordinary token with a probability drawn per sample; the loss is the bound in nats per token.

    The label of a sequence is its masking rate, which `show-batch` shows.
    """

    smallest_rate: float = Field(
        1e-3, gt=0, lt=1, description="Minimum masking rate; the rate of each sample is uniform between this and 1."
    )
    weighted: bool = Field(
        True,
        description="Whether each prediction is weighted by the inverse of its sample's masking rate and the mean is"
        " over all tokens (the bound); otherwise all predictions weigh the same and the mean is over them.",
    )

    term: ClassVar[str] = "masked_diffusion"
    in_place: ClassVar[bool] = True
    has_accuracy: ClassVar[bool] = False
    fills_masks: ClassVar[bool] = True

    @property
    def tokens_label(self) -> str:
        """The label with each sequence's number of ordinary tokens, over which the mean is taken."""
        return f"{self.term}/tokens"

    @property
    def scoring_rule(self) -> str | None:
        return "original"

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        others = [each.term for each in objectives if each.term in ("masked_lm", "masked_next_token")]
        found = [f"objective.{self.term} and objective.{each} would mask the same tokens; use one" for each in others]
        leaders = [each for each in objectives if isinstance(each, CompanionObjective)]
        return found + [
            f"objective.{each.term} needs objective.masked_lm, not {self.term}, to choose the tokens"
            for each in leaders
            if each.companion == "generator"
        ]

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        self.require_mask(tokenizer)
        return self

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Draw each sample's rate and mask its tokens."""
        uniform_B = draw.uniform("diffusion/rate", epoch=samples.epoch_B, sample=samples.sample_B)
        rate_B = (1 - self.smallest_rate) * uniform_B + self.smallest_rate
        rate_T = rate_B[samples.sequence_T]
        free_T = samples.free_T
        index_M = np.flatnonzero((samples.uniform_T(draw, "diffusion/mask") < rate_T) & free_T)
        weight_M = (1 / rate_T[index_M]).astype(np.float32)
        ids_T = samples.ids_T.copy()
        ids_T[index_M] = vocabulary.mask_id
        tokens_B = np.bincount(samples.sequence_T[free_T], minlength=samples.lengths_B.size)
        labels: dict[str, Any] = {self.term: rate_B.astype(np.float32), self.tokens_label: tokens_B}
        targets = Targets(index_M, samples.ids_T[index_M], columns={_WEIGHT: weight_M})
        return samples.with_targets(self.term, targets, ids_T=ids_T, labels={**samples.labels, **labels})

    def expected_count(self, length: int) -> float:
        """The number of predicted tokens: half of all, on average over the rates."""
        return (1 + self.smallest_rate) / 2 * max(1, length - 2)

    def count(self, batch: PackedBatch) -> int:
        if not self.weighted:
            return super().count(batch)
        # On the host, which would otherwise wait for the GPU.
        return int((batch.host or batch).labels[self.tokens_label].sum())

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """The summed cross-entropy at the masks, in nats, each divided by its sample's rate; the count is that of all
        ordinary tokens.

        Counters: tokens that are `predicted`, and those that are `right`.
        """
        targets = batch.targets[self.term]
        (head,) = self.heads
        projection = model.projection(head, hidden_TD.index_select(0, targets.index_M))
        weight_M = targets.columns[_WEIGHT] if self.weighted else None
        z_loss = self.z_loss if model.training else 0.0
        found = LossSum.of_words(projection, targets.id_M, z_loss=z_loss, weight_M=weight_M)
        counters = {"predicted": found.correct.new_full((), targets.count), "right": found.correct}
        return LossSum(found.sum, self.count(batch), found.correct, counters)

    def figures(self, counters: Mapping[str, int], count: int) -> dict[str, float]:
        """`accuracy/masked_diffusion`: accuracy at the masked tokens, over all masking rates."""
        return {f"accuracy/{self.term}": counters.get("right", 0) / max(1, counters.get("predicted", 0))}
