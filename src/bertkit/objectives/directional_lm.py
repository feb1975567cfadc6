"""Language modelling of continuous text: predict the token after each token of a lane, including the last one.

Dai et al. 2019, Transformer-XL, arXiv:1901.02860; Peters et al. 2018, ELMo, arXiv:1802.05365, section 3.1, where both
directions share the softmax. `ForwardLM` is for lanes that are read from left to right, `BackwardLM` for those from
right to left, where the next token is the previous one in the text. Sibling causal_lm.py predicts within single
sequences, whose first tokens have no context.

Shapes: T packed tokens, B sequences, M predicted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.layouts import ContinuousText
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.operators.adaptive_softmax import AdaptiveProjection
from bertkit.models.operators.sampled_softmax import sampled_cross_entropy
from bertkit.objectives.base import TokenPrediction
from bertkit.settings import UnreadKey


class DirectionalLM(TokenPrediction):
    """Predict the token after each token of the lanes that are read in one direction."""

    negatives: int | None = Field(
        None,
        ge=1,
        description="Number of words in the sampled softmax, redrawn for every micro-batch; null: the full softmax,"
        " which evaluations always compute.",
    )

    is_backward: ClassVar[bool]
    has_perplexity: ClassVar[bool] = True
    is_random: ClassVar[bool] = False

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from super().unread_keys(recipe)
        if self.negatives is not None:
            why = f"objective.{self.term}.negatives replaces the softmax over all words, to which it belongs"
            yield UnreadKey("z_loss", why, "leave negatives out")

    @property
    def heads(self) -> tuple[str, ...]:
        return ("causal_lm",)

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        name = f"objective.{self.term}"
        if not isinstance(data.layout, ContinuousText):
            return [f"{name} needs continuous text; set data.layout.name: continuous"]
        if "causal_lm" not in model.heads():
            return [f"{name}: model.family {model.model_type!r} has no head causal_lm; use transfo-xl or elmo"]
        if self.is_backward and not data.layout.bidirectional:
            return [f"{name} needs text that is read from right to left; set data.layout.bidirectional: true"]
        if self.is_backward != data.layout.bidirectional and not model.reads_backward:
            return [
                f"data.layout.bidirectional: model.family {model.model_type!r} reads only from left to right; set it"
                " to false"
            ]
        return []

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """Summed cross-entropy in nats; in training against a sample of words if `negatives` is set."""
        if self.negatives is None or not model.training:
            return super().loss(model, hidden_TD, batch)
        targets = batch.targets[self.term]
        projection = model.projection(self.heads[0], hidden_TD.index_select(0, targets.index_M))
        if isinstance(projection, AdaptiveProjection):
            raise UsageError(f"objective.{self.term}.negatives: the softmax is adaptive; set model.cutoffs: []")
        loss, correct = sampled_cross_entropy(projection, targets.id_M, self.negatives)
        return LossSum(loss, targets.count, correct)

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Mark the token after each token; ids are unchanged."""
        lanes = samples.lanes
        assert lanes is not None, "the layout is of lanes"
        following_T = np.roll(samples.ids_T, -1)
        following_T[samples.cu_seqlens_B1[1:] - 1] = lanes.following_B
        index_M = np.flatnonzero((lanes.reversed_B == self.is_backward)[samples.sequence_T])
        return samples.with_targets(self.term, Targets(index_M, following_T[index_M]))

    def expected_count(self, length: int) -> float:
        return float(length)

    def share_of_sequences(self, data: DataConfig) -> float:
        return 0.5 if isinstance(data.layout, ContinuousText) and data.layout.bidirectional else 1.0

    def head_states(self, predictions: float, tokens: float, sequences: float, vocab_size: int) -> float:
        return predictions if self.negatives is None else predictions * min(self.negatives / vocab_size, 1.0)


class ForwardLM(DirectionalLM):
    """Predict the next token, from left to right."""

    term: ClassVar[str] = "forward_lm"
    is_backward: ClassVar[bool] = False


class BackwardLM(DirectionalLM):
    """Predict the next token, from right to left."""

    term: ClassVar[str] = "backward_lm"
    is_backward: ClassVar[bool] = True
