"""Word order: put shuffled trigrams back in order.

Wang et al. 2019, StructBERT, arXiv:1908.04577, section 2, the word structural objective. In addition to the masked LM,
5% of the trigrams of unmasked tokens are shuffled, and the masked-LM head predicts the original token at each of their
positions. No code for it was released; what the paper does not specify is decided here:

- A trigram is any three consecutive tokens of a sequence, none of them special, causal, or predicted by an objective of
  lower rank (a masked-LM target counts as masked even if its token was kept). Overlapping ones count separately; n
  consecutive free tokens have n - 2.
- Of a sequence's t trigrams, 0.05 t are shuffled, rounded up or down at random so that the share is 5% on average at
  any length. They are chosen uniformly, one after the other, among those that overlap none chosen before. With 15% of
  the tokens masked, about 9% are therefore shuffled.
- A shuffle is a uniform permutation, including the identity, and all its tokens are predicted. As with the masked LM's
  kept tokens, the model must consider that a token may be in its place.

Sibling of masked_lm.py, whose loss and head it uses; the two means have equal weight.

Shapes: T packed tokens, B sequences, W trigrams, S shuffled trigrams, K tokens of one, M predicted tokens, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

from bertkit.arrays import BoolArray, Float64Array, Int64Array
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.objectives.base import Objective, TokenPrediction
from bertkit.objectives.masked_next_token import MaskedNextToken

_USUALLY_FREE = 0.85
"""Share of the tokens that the masked LM does not choose, for estimates."""


class WordOrder(TokenPrediction):
    """Predict the original token at each position of a few shuffled trigrams."""

    share: float = Field(
        0.05, gt=0, lt=1, description="Share of a sequence's trigrams of unmasked tokens that is shuffled."
    )
    length: int = Field(3, ge=2, description="K of the paper: number of tokens that are shuffled among one another.")

    term: ClassVar[str] = "word_order"
    in_place: ClassVar[bool] = True
    change: ClassVar[str] = "moved"
    rank: ClassVar[int] = 1

    @model_validator(mode="after")
    def _has_room(self) -> WordOrder:
        # A chosen run excludes at most length - 1 others on either side.
        most = 1 / (2 * self.length - 1)
        if self.share > most:
            raise ValueError(
                f"share ({self.share:g}) must not exceed {most:.3g}; otherwise so many runs of {self.length} tokens"
                " may not fit without overlap"
            )
        return self

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        return [
            f"objective.{self.term} could move tokens that objective.{each.term} has masked; use masked_lm with it"
            for each in objectives
            if isinstance(each, MaskedNextToken)
        ]

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        start_W = self._trigrams(samples)
        sequence_W = samples.sequence_T[start_W]
        total_B = np.bincount(sequence_W, minlength=samples.lengths_B.size)
        rounding_B = draw.uniform("shuffle/round", epoch=samples.epoch_B, sample=samples.sample_B)
        count_B = np.floor(self.share * total_B + rounding_B).astype(np.int64)
        priority_W = samples.uniform_T(draw, "shuffle/choose")[start_W]
        apart_W = _first_come_apart(start_W, priority_W, self.length)
        start_W, sequence_W, priority_W = start_W[apart_W], sequence_W[apart_W], priority_W[apart_W]
        order_W = np.lexsort((priority_W, sequence_W))
        first_B = np.searchsorted(sequence_W, np.arange(count_B.size))
        rank_W = np.arange(order_W.size) - first_B[sequence_W]
        start_S = np.sort(start_W[order_W[rank_W < count_B[sequence_W]]])
        place_SK = start_S[:, None] + np.arange(self.length)
        permutation_SK = samples.uniform_T(draw, "shuffle/order")[place_SK].argsort(axis=1)
        ids_T = samples.ids_T.copy()
        ids_T[place_SK] = samples.ids_T[np.take_along_axis(place_SK, permutation_SK, axis=1)]
        index_M = place_SK.ravel()
        return samples.with_targets(self.term, Targets(index_M, samples.ids_T[index_M]), ids_T=ids_T)

    def _trigrams(self, samples: Samples) -> Int64Array:
        """The start of each run of `length` free tokens of one sequence, including overlapping ones."""
        free_T = samples.free_T
        last = self.length - 1
        room = max(free_T.size - last, 0)
        starts_T = samples.sequence_T[:room] == samples.sequence_T[last:]
        for offset in range(self.length):
            starts_T &= free_T[offset : offset + room]
        return np.flatnonzero(starts_T)

    def expected_count(self, length: int) -> float:
        return self.length * self.share * max(length - self.length - 1, 0) * _USUALLY_FREE**self.length


def _first_come_apart(start_W: Int64Array, priority_W: Float64Array, length: int) -> BoolArray:
    """Which runs are chosen in the order of their priority, when those that overlap a chosen one are skipped.

    A run with precedence over all that overlap it is always chosen, so all of these are chosen at once and the rest is
    visited again: a few rounds in place of W steps. With equal priorities, the earlier run comes first.
    """
    chosen_W = np.zeros(start_W.size, dtype=np.bool_)
    left = np.arange(start_W.size)
    while left.size:
        start, priority = start_W[left], priority_W[left]
        first = np.ones(left.size, dtype=np.bool_)
        for distance in range(1, min(length, left.size)):
            overlap = start[distance:] - start[:-distance] < length
            later = overlap & (priority[distance:] < priority[:-distance])
            first[:-distance] &= ~later
            first[distance:] &= ~(overlap & ~later)
        chosen_W[left[first]] = True
        near = np.searchsorted(start[first], start)
        chosen = np.concatenate([[-length], start[first], [start[-1] + length]])
        left = left[(start - chosen[near] >= length) & (chosen[near + 1] - start >= length)]
    return chosen_W
