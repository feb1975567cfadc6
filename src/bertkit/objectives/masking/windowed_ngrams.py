"""One n-gram in each window of the text, from left to right until the count is reached.

He et al. 2021, DeBERTa, arXiv:2006.03654, appendix A.1, and DeBERTaV3, arXiv:2111.09543; procedure of the released
mlm_task.py (`NGramMaskGenerator`), which follows XLNet's. A length n is drawn with p(n) proportional to 1/n, and its
place uniformly in a window of `window` times n units; the next window begins behind it. Units are words, or single
tokens if `longest` is 1. Sibling ngrams.py is ALBERT's, which draws n-grams anywhere.

Quirks honoured: with a window of 6 and 15% of the tokens, the count is reached before the end of the text, so the last
tenth of a sequence is hardly ever masked; an n-gram may extend beyond its window, which moves the next one. Quirk left:
there, the last word may exceed the count.

Shapes: T packed tokens, B sequences, U units, b sequences with windows left.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from bertkit.arrays import Int64Array
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.objectives.masking.base import Chosen, chosen_units
from bertkit.objectives.masking.ngrams import Ngrams


class WindowedNgrams(Ngrams):
    """N-grams in consecutive windows."""

    name: Literal["windowed-ngrams"] = "windowed-ngrams"  # type: ignore[assignment]  # the tag of the union
    longest: int = Field(1, ge=1, description="Maximum n-gram length: in tokens if it is 1, otherwise in words.")
    window: int = Field(6, ge=1, description="Size of a window in units for each unit of its n-gram.")

    def errors(self, data: DataConfig) -> list[str]:
        return super().errors(data) if self.longest > 1 else []

    def choose(self, samples: Samples, vocabulary: Vocabulary, counts_B: Int64Array, draw: Draw) -> Chosen:
        start_U, length_U = self._units(samples, vocabulary)
        sequence_U = samples.sequence_T[start_U]
        number_U = self.drawn(samples.uniform_T(draw, "mask/length")[start_U])
        place_U = samples.uniform_T(draw, "mask/choose")[start_U]
        units_B = np.bincount(sequence_U, minlength=counts_B.size)
        next_B = np.cumsum(units_B) - units_B
        end_B = next_B + units_B
        edges_U1 = np.zeros(start_U.size + 1, dtype=np.int64)  # +1 where an n-gram begins, -1 behind it
        while (left_b := np.flatnonzero(next_B < end_B)).size:
            unit_b, end_b = next_B[left_b], end_B[left_b]
            number_b = number_U[unit_b]
            reach_b = np.minimum(number_b * self.window, end_b - unit_b)
            first_b = unit_b + (place_U[unit_b] * reach_b).astype(np.int64)
            behind_b = np.minimum(first_b + number_b, end_b)
            np.add.at(edges_U1, first_b, 1)
            np.add.at(edges_U1, behind_b, -1)
            next_B[left_b] = np.maximum(unit_b + reach_b, behind_b)
        chosen_U = np.flatnonzero(np.cumsum(edges_U1)[:-1] > 0)
        tokens_U1 = np.concatenate([[0], np.cumsum(length_U[chosen_U])])
        before_B = tokens_U1[np.searchsorted(sequence_U[chosen_U], np.arange(counts_B.size))]
        fits_U = tokens_U1[1:] - before_B[sequence_U[chosen_U]] <= counts_B[sequence_U[chosen_U]]
        return chosen_units(start_U[chosen_U[fits_U]], length_U[chosen_U[fits_U]])

    def _units(self, samples: Samples, vocabulary: Vocabulary) -> tuple[Int64Array, Int64Array]:
        """The packed position of each unit's first token, and its number of tokens."""
        if self.longest > 1:
            words = self.words(samples, vocabulary)
            return words.start_W, words.length_W
        start_U = np.flatnonzero(~samples.fixed_T)
        return start_U, np.ones_like(start_U)
