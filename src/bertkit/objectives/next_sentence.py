"""Next-sentence prediction: does the second segment follow the first, or does it come from elsewhere?

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1, task 2. The label is made by the segment-pair layout: 0 where
the second segment follows, 1 where it is random, as in the released code. Sibling: sentence order, which swaps two
segments.

Shapes: T packed tokens, B sequences, D width.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.models.pretraining import PretrainingModel
from bertkit.objectives.base import LossSum, Objective


class NextSentence(Objective):
    """Binary classification of the pooled [CLS] state."""

    term: ClassVar[str] = "next_sentence"
    needs_label: ClassVar[bool] = True

    def expected_count(self, length: int) -> float:
        return 1.0

    def count(self, batch: PackedBatch) -> int:
        return batch.num_sequences

    def loss(self, model: PretrainingModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """Summed cross-entropy over the batch's pairs."""
        logits_B2 = model.next_sentence_logits(hidden_TD.index_select(0, batch.first_token_B)).float()
        label_B = batch.labels[self.term]
        loss = functional.cross_entropy(logits_B2, label_B, reduction="sum")
        correct = (logits_B2.detach().argmax(dim=-1) == label_B).sum()
        return LossSum(loss, self.count(batch), correct)
