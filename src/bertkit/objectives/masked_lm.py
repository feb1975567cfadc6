"""Masked language modelling: predict a few tokens that were hidden or replaced.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1 and appendix A.1; counts and draws as in the released
create_pretraining_data.py. Siblings mask whole words, n-grams or spans; here single pieces are masked.

Quirks honoured: the rate is of the whole length, [CLS] and [SEP] included, though these two are never chosen; the
count is exact, not a coin toss per token; a random word is drawn from the whole vocabulary, special tokens included.
Whether masks are static or drawn anew is the data's choice (`data.static_copies`).

Shapes: T packed tokens, B sequences, M predicted tokens, V vocabulary, D width.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.models.pretraining import PretrainingModel
from bertkit.objectives.base import LossSum, Objective


class MaskedLM(Objective):
    """Predict an exact count of tokens per sequence, chosen uniformly among its ordinary tokens."""

    rate: float = Field(0.15, gt=0, lt=1, description="Share of a sequence's tokens that is predicted.")
    max_predictions: int | None = Field(
        None, ge=1, description="At most this many predictions per sequence; null: no limit."
    )
    mask_share: float = Field(0.8, ge=0, le=1, description="Share of the predicted tokens that [MASK] stands in for.")
    random_share: float = Field(0.1, ge=0, le=1, description="Share that a random token stands in for; the rest stays.")

    term: ClassVar[str] = "masked_lm"

    @model_validator(mode="after")
    def _shares_fit(self) -> MaskedLM:
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise ValueError(
                f"mask_share ({self.mask_share}) and random_share ({self.random_share}) must not exceed 1 together"
            )
        return self

    def counts_B(self, lengths_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many tokens of a sequence of each length are predicted, if it has as many ordinary ones."""
        counts_B: NDArray[np.int64] = np.maximum(1, np.rint(self.rate * lengths_B)).astype(np.int64)
        return counts_B if self.max_predictions is None else np.minimum(counts_B, self.max_predictions)

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        # The k smallest of one uniform number per candidate are a uniform choice of k without replacement.
        order_T = np.lexsort(
            (np.where(samples.special_T, 2.0, samples.uniform_T(draw, "mask/choose")), samples.sequence_T)
        )
        # Sequences stay in order under this sort, so a token's rank is its position among its sequence's tokens.
        chosen_T = (samples.position_T < self.counts_B(samples.lengths_B)[samples.sequence_T]) & ~samples.special_T[
            order_T
        ]
        target_index_M = np.sort(order_T[chosen_T])
        target_id_M = samples.ids_T[target_index_M]
        sequence_M = samples.sequence_T[target_index_M]
        address = {
            "epoch": samples.epoch_B[sequence_M],
            "sample": samples.sample_B[sequence_M],
            "position": samples.position_T[target_index_M],
        }
        action_M = draw.uniform("mask/action", **address)
        random_id_M = draw.integers("mask/word", vocabulary.size, **address)
        stands_in_M = np.where(action_M < self.mask_share + self.random_share, random_id_M, target_id_M)
        stands_in_M = np.where(action_M < self.mask_share, vocabulary.mask_id, stands_in_M)
        ids_T = samples.ids_T.copy()
        ids_T[target_index_M] = stands_in_M
        return samples.with_targets(self.term, Targets(target_index_M, target_id_M), ids_T=ids_T)

    def expected_count(self, length: int) -> float:
        return float(self.counts_B(np.array([length]))[0])

    def count(self, batch: PackedBatch) -> int:
        return batch.targets[self.term].count

    def loss(self, model: PretrainingModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """Summed cross-entropy at the predicted positions; the vocabulary projection runs on these alone."""
        targets = batch.targets[self.term]
        logits_MV = model.masked_lm_logits(hidden_TD.index_select(0, targets.index_M)).float()
        loss = functional.cross_entropy(logits_MV, targets.id_M, reduction="sum")
        correct = (logits_MV.detach().argmax(dim=-1) == targets.id_M).sum()
        return LossSum(loss, self.count(batch), correct)
