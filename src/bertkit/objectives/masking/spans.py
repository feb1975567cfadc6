"""Spans of whole words with geometrically distributed lengths.

Joshi et al. 2019, SpanBERT, arXiv:1907.10529, section 3.1; procedure of the released masking.py: an anchor is drawn
among the tokens that are not chosen yet and moved to the beginning of its word, and a length in words is drawn from
Geo(p), clipped at `longest` and renormalised. This is repeated until the count is reached.

Quirks honoured: the count is the rate times the number of ordinary tokens, rounded up; spans may meet, and those that
overlap or touch become one; the last one is cut when the count is reached, even inside a word; one draw decides for a
whole span whether it is masked, replaced or kept. The released code draws random tokens by their frequency in the
corpus: `masked_lm.random_from: corpus`.

Shapes: T packed tokens, B sequences, b sequences that still choose, M chosen tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from bertkit.arrays import BoolArray, Int64Array
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.objectives.masking.base import Chosen, ranked, spread
from bertkit.objectives.masking.words import WholeWordMasking
from bertkit.settings import UnreadKey


class Spans(WholeWordMasking):
    """Spans at random positions until the count is reached."""

    name: Literal["spans"] = "spans"
    p: float = Field(0.2, gt=0, lt=1, description="Parameter of the geometric distribution of span lengths in words.")
    longest: int = Field(10, ge=1, description="Maximum span length in words.")

    replaced_as_one: ClassVar[bool] = True

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.longest == 1:
            yield UnreadKey("p", "units.longest is 1: every span is one word", "raise longest")

    def counts_B(self, rate: float, lengths_B: Int64Array, ordinary_B: Int64Array) -> Int64Array:
        """The rate times the number of ordinary tokens, rounded up."""
        counts_B: Int64Array = np.ceil(rate * ordinary_B).astype(np.int64)
        return counts_B

    def choose(self, samples: Samples, vocabulary: Vocabulary, counts_B: Int64Array, draw: Draw) -> Chosen:
        words = self.words(samples, vocabulary)
        number_T = self.drawn(samples.uniform_T(draw, "mask/length"))
        candidate_C = np.flatnonzero(words.word_T >= 0)
        key_C = samples.uniform_T(draw, "mask/choose")[candidate_C]
        chosen_T = np.zeros(samples.ids_T.size, dtype=np.bool_)
        left_B = counts_B.copy()
        # In a random order of all tokens, the first one not chosen yet is a uniform draw among those not chosen.
        for visited_B in ranked(key_C, samples.sequence_T[candidate_C], left_B.size):
            sequence_b = np.flatnonzero((visited_B >= 0) & (left_B > 0))
            if not sequence_b.size:
                break
            anchor_b = candidate_C[visited_B[sequence_b]]
            sequence_b, anchor_b = sequence_b[~chosen_T[anchor_b]], anchor_b[~chosen_T[anchor_b]]
            take(sequence_b, *words.spans(anchor_b, number_T[anchor_b]), chosen_T, left_B)
        return merged(np.flatnonzero(chosen_T), samples.sequence_T)

    def drawn(self, uniform_T: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Int64Array:
        """Lengths in words, from uniform numbers in [0, 1)."""
        weight_N = self.p * (1 - self.p) ** np.arange(self.longest)
        drawn_T: Int64Array = 1 + np.searchsorted(np.cumsum(weight_N / weight_N.sum())[:-1], uniform_T, side="right")
        return drawn_T


def take(
    sequence_b: Int64Array, start_b: Int64Array, length_b: Int64Array, chosen_T: BoolArray, left_B: Int64Array
) -> None:
    """Choose one span in each of these sequences: as many of its new tokens as the count still allows.

    Args:
        sequence_b: the sequences, each once.
        start_b, length_b: their spans.
        chosen_T: tokens that are already chosen; changed in place.
        left_B: number of tokens that each sequence may still choose; changed in place.
    """
    token, span = spread(start_b, length_b)
    new = ~chosen_T[token]
    new_before_b = np.bincount(span[new], minlength=sequence_b.size)
    new_before_b = np.cumsum(new_before_b) - new_before_b
    allowed = new & (np.cumsum(new) - new_before_b[span] <= left_B[sequence_b][span])
    chosen_T[token[allowed]] = True
    left_B[sequence_b] -= np.bincount(span[allowed], minlength=sequence_b.size)


def merged(index_M: Int64Array, sequence_T: Int64Array) -> Chosen:
    """Chosen tokens as spans: adjacent tokens of one sequence form one."""
    if not index_M.size:
        return Chosen(index_M, index_M)
    begins_M = np.ones(index_M.size, dtype=np.bool_)
    begins_M[1:] = (np.diff(index_M) > 1) | (np.diff(sequence_T[index_M]) > 0)
    return Chosen(index_M, index_M[begins_M][np.cumsum(begins_M) - 1])
