"""Bag of words: predict which words a text has from the states of all its tokens but the first.

Xiao et al. 2022, DupMAE (RetroMAE v2), arXiv:2211.08769; as in data.py and modeling_duplex.py of
staoxiao/RetroMAE. The head of the masked LM gives each word a logit at each token; the softmax of each word's greatest
logit is compared with the words that occur. While enhanced_decoding.py makes the first token's state
represent the text, this makes those of the other tokens do so.

Quirks honoured: every different word has the same weight, 1 / tokens of the text, so the weights of a text in which
words recur do not add up to 1; the encoder reads masks in place of some words; the separator's state counts, too.

Shapes: T packed tokens, B sequences, M different words of all sequences, R tokens whose states are read, D width, V
vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.operators.word_pooling import greatest_logits
from bertkit.objectives.base import States
from bertkit.objectives.enhanced_decoding import EnhancedDecoding
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.unmasked_text import UnmaskedText


class BagOfWords(UnmaskedText):
    """Predict the set of a text's words from the greatest logit that each word has at any token."""

    weight: float = Field(0.1, ge=0, description="Weight of this term's mean over texts in the total loss.")

    term: ClassVar[str] = "bag_of_words"
    states: ClassVar[States] = "sequences"
    is_random: ClassVar[bool] = False
    has_accuracy: ClassVar[bool] = False
    rank: ClassVar[int] = EnhancedDecoding.rank + 1

    @property
    def heads(self) -> tuple[str, ...]:
        return (MaskedLM.term,)

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        return MaskedLM().errors(data, model)

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Mark the first occurrence of each word in each sequence, with the column `share`, its weight.

        Raises:
            UsageError: if no masked LM has chosen tokens.
        """
        text = self.unmasked(samples)
        index_N = np.flatnonzero(~text.special_T)
        words = np.stack([text.sequence_T[index_N], text.ids_T[index_N]])
        _, first_M = np.unique(words, axis=1, return_index=True)
        index_M = index_N[np.sort(first_M)]
        tokens_B = np.bincount(words[0], minlength=text.lengths_B.size)
        share_M = (1 / tokens_B[text.sequence_T[index_M]]).astype(np.float32)
        return samples.with_targets(self.term, Targets(index_M, text.ids_T[index_M], columns={"share": share_M}))

    def expected_count(self, length: int) -> float:
        return 1.0

    def head_states(self, predictions: float, tokens: float, sequences: float, vocab_size: int) -> float:
        return tokens - sequences

    def reads(self, model: HeadedModel, batch: PackedBatch) -> Tensor | None:
        """All tokens but the first of each sequence, (R,), unless it is the only one."""
        starts_B1 = batch.sequences.cu_seqlens_B1.long()
        read_T = torch.ones(batch.num_tokens, dtype=torch.bool, device=starts_B1.device)
        return read_T.index_copy(0, starts_B1[:-1], starts_B1.diff() == 1).nonzero()[:, 0]

    def expected_reads(self, model: HeadedModel, predictions: float) -> float | None:
        return None

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """Summed cross-entropy of the texts, in nats."""
        targets, starts_B1 = batch.targets[self.term], batch.sequences.cu_seqlens_B1.long()
        index_R = self.reads(model, batch)
        assert index_R is not None
        read_B1 = torch.searchsorted(index_R, starts_B1)
        projection = model.projection(MaskedLM.term, hidden_TD.index_select(0, index_R))
        log_probability_BV = greatest_logits(projection, read_B1).log_softmax(dim=1)
        sequence_M = torch.searchsorted(starts_B1, targets.index_M, right=True) - 1
        loss = -(targets.columns["share"] * log_probability_BV[sequence_M, targets.id_M]).sum()
        return LossSum(loss, self.count(batch), loss.new_zeros((), dtype=torch.int64))
