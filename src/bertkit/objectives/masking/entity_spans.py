"""Spans that are named entities half of the time, and otherwise random whole words.

Joshi et al. 2019, SpanBERT, arXiv:1907.10529, section 5.1, the comparison of masking schemes: named entities, and noun
phrases in the same way. Procedure of NERSpanMaskingScheme in the released masking.py: until the count is reached, an
entity of the text is drawn with probability `entity_rate`, otherwise a span as in spans.py. Entities are marked in the
corpus (`data.reading.span_fields`, as in annotated.py). The other half in the paper are single whole words:
`longest: 1`.

Quirks honoured: the count is the rate times the number of ordinary tokens, rounded up, and cuts the last span, even an
entity; every entity is equally likely at each draw, and drawing one that is already covered has no effect; spans that
overlap or touch become one, with one draw for how they are replaced. Quirk left: entities that touch are one there;
here each has its own marks.

Shapes: T packed tokens, B sequences, b sequences that still choose, E entities, M chosen tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from bertkit.arrays import Float64Array, Int64Array
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.objectives.masking.annotated import MarkedSpans
from bertkit.objectives.masking.base import Chosen
from bertkit.objectives.masking.spans import Spans, merged, take
from bertkit.settings import UnreadKey


class EntitySpans(MarkedSpans):
    """Random entities and spans at random positions until the count is reached."""

    name: Literal["entity-spans"] = "entity-spans"
    field: str = Field("entities", description="Which of data.reading.span_fields is used.")
    entity_rate: float = Field(0.5, gt=0, lt=1, description="Probability that a drawn span is an entity.")
    p: float = Field(0.2, gt=0, lt=1, description="Parameter of the geometric distribution of span lengths in words.")
    longest: int = Field(1, ge=1, description="Maximum length in words of a span that is not an entity.")

    replaced_as_one: ClassVar[bool] = True

    @property
    def others(self) -> Spans:
        """The spans that are not entities."""
        return Spans(p=self.p, longest=self.longest)

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from self.others.unread_keys(recipe)

    def counts_B(self, rate: float, lengths_B: Int64Array, ordinary_B: Int64Array) -> Int64Array:
        return self.others.counts_B(rate, lengths_B, ordinary_B)

    def choose(self, samples: Samples, vocabulary: Vocabulary, counts_B: Int64Array, draw: Draw) -> Chosen:
        others, words = self.others, self.words(samples, vocabulary)
        starts_T, inside_T = self.span_tokens(samples)
        start_E = np.flatnonzero(starts_T)
        length_E = np.bincount(np.cumsum(starts_T)[inside_T] - 1, minlength=start_E.size)
        entities = _PerSequence(samples.sequence_T[start_E], counts_B.size)
        token_C = np.flatnonzero(words.word_T >= 0)
        tokens = _PerSequence(samples.sequence_T[token_C], counts_B.size)
        chosen_T = np.zeros(samples.ids_T.size, dtype=np.bool_)
        left_B = counts_B.copy()
        for turn in count():
            sequence_b = np.flatnonzero(left_B > 0)
            if not sequence_b.size:
                break
            at: dict[str, Any] = {"position": turn}
            at |= {"epoch": samples.epoch_B[sequence_b], "sample": samples.sample_B[sequence_b]}
            place_b, number_b = draw.uniform("mask/place", **at), others.drawn(draw.uniform("mask/length", **at))
            of_entity_b = draw.uniform("mask/entity", **at) < self.entity_rate
            with_b = of_entity_b & (entities.count_B[sequence_b] > 0)
            drawn_b = entities.drawn(sequence_b[with_b], place_b[with_b])
            take(sequence_b[with_b], start_E[drawn_b], length_E[drawn_b], chosen_T, left_B)
            anchor_b = token_C[tokens.drawn(sequence_b[~of_entity_b], place_b[~of_entity_b])]
            new_b = ~chosen_T[anchor_b]
            spans = words.spans(anchor_b[new_b], number_b[~of_entity_b][new_b])
            take(sequence_b[~of_entity_b][new_b], *spans, chosen_T, left_B)
        return merged(np.flatnonzero(chosen_T), samples.sequence_T)


class _PerSequence:
    """Items ordered by sequence, from which one of a sequence's own is drawn."""

    def __init__(self, sequence_X: Int64Array, sequences: int) -> None:
        self.count_B = np.bincount(sequence_X, minlength=sequences)
        self.first_B = np.cumsum(self.count_B) - self.count_B

    def drawn(self, sequence_b: Int64Array, uniform_b: Float64Array) -> Int64Array:
        """The number of the item that each of these sequences draws; each must have at least one."""
        drawn_b: Int64Array = self.first_B[sequence_b] + (uniform_b * self.count_B[sequence_b]).astype(np.int64)
        return drawn_b
