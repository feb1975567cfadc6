"""Span boundary: predict each token of a masked span from the two tokens next to the span.

Joshi et al. 2019, SpanBERT, arXiv:1907.10529, section 3.2; as in the released pair_bert.py and masking.py. The spans
are those chosen by the masked LM, which has a lower rank. A token is predicted only from the states of the nearest
tokens outside its span and the token's number in the span. The mean is added to the masked LM's with its own weight.

Quirks honoured: spans that overlap or touch count as one; a span at the edge of the text, next to a special token, is
not predicted; for a long span, only the first `max_targets` tokens are. Special tokens inside a sample, which do not
occur in the released code, are edges as well.

Shapes: T packed tokens, M predicted tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from bertkit.arrays import BoolArray, Int64Array
from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.models.heads import SPAN_POSITIONS, SpanBoundaryHead
from bertkit.models.loss_sum import LossSum
from bertkit.models.operators.vocabulary import VocabularyProjection
from bertkit.objectives.base import Objective, States, Target
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking.spans import merged

_TYPICAL_RATE = 0.15


class SpanBoundary(Objective):
    """Predict the masked LM's spans again, from the tokens outside them."""

    max_targets: int = Field(
        20,
        ge=1,
        le=SPAN_POSITIONS,
        description="Maximum number of tokens predicted per span, counted from its start.",
    )

    term: ClassVar[str] = "span_boundary"
    target: ClassVar[Target | None] = "token"
    states: ClassVar[States] = "targets"
    rank: ClassVar[int] = MaskedLM.rank + 1

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        masked = next((each for each in objectives if each.term == MaskedLM.term), None)
        if isinstance(masked, MaskedLM) and masked.units.replaced_as_one:
            return []
        return [
            "objective.span_boundary needs masked_lm with spans in addition; add `- masked_lm: {units: {name: spans}}`"
        ]

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Mark the targets, with the inputs of their prediction: `places` `left` and `right`, and `columns` `offset`,
        the token's number in its span.

        Raises:
            UsageError: if no masked LM has chosen spans.
        """
        masked = samples.targets.get(MaskedLM.term)
        if masked is None or "unit" not in masked.places:
            raise UsageError(
                "objective.span_boundary predicts the spans that masked_lm masks, but there are none; add"
                " `masked_lm: {units: {name: spans}}`"
            )
        index_M = masked.index_M
        # The units of tiled-spans can touch, and their first tokens need not be chosen.
        first_M = merged(index_M, samples.sequence_T).first_M
        assert first_M is not None, "merged() gives every token's span"
        offset_M = index_M - first_M
        begins_M = offset_M == 0
        span_M = np.cumsum(begins_M) - 1
        left_M = first_M - 1
        right_M = (index_M[begins_M] + np.bincount(span_M, minlength=int(begins_M.sum())))[span_M]
        predicted_M = _is_text(samples, left_M, index_M) & _is_text(samples, right_M, index_M)
        predicted_M &= offset_M < self.max_targets
        targets = Targets(
            index_M[predicted_M],
            masked.id_M[predicted_M],
            {"left": left_M[predicted_M], "right": right_M[predicted_M]},
            {"offset": offset_M[predicted_M]},
        )
        return samples.with_targets(self.term, targets)

    def expected_count(self, length: int) -> float:
        """At SpanBERT's rate, assuming no span is at an edge."""
        return _TYPICAL_RATE * length

    def reads(self, model: HeadedModel, batch: PackedBatch) -> Tensor | None:
        places = batch.targets[self.term].places
        return torch.cat([places["left"], places["right"]])

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """Summed cross-entropy of the spans' tokens, over the whole vocabulary."""
        return LossSum.of_words(span_boundary_projection(model, hidden_TD, batch), batch.targets[self.term].id_M)


def span_boundary_projection(model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> VocabularyProjection:
    """The logits of the batch's targets, computed when they are read."""
    targets = batch.targets[SpanBoundary.term]
    left_MD = hidden_TD.index_select(0, targets.places["left"])
    right_MD = hidden_TD.index_select(0, targets.places["right"])
    head = model.get_submodule(SpanBoundary.term)
    assert isinstance(head, SpanBoundaryHead)
    return head.project_span(left_MD, right_MD, targets.columns["offset"], model.encoder.word_embedding.weight)


def _is_text(samples: Samples, place_M: Int64Array, index_M: Int64Array) -> BoolArray:
    """Whether a position is an ordinary token of the same sequence."""
    inside_M = (place_M >= 0) & (place_M < samples.ids_T.size)
    place_M = np.where(inside_M, place_M, index_M)
    same_M = samples.sequence_T[place_M] == samples.sequence_T[index_M]
    return np.asarray(inside_M & same_M & ~samples.fixed_T[place_M])
