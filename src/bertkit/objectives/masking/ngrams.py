"""N-grams of whole words; shorter ones are more frequent.

Lan et al. 2019, ALBERT, arXiv:1909.11942, section 4.1: p(n) is proportional to 1/n for n up to 3. Procedure of the
released create_pretraining_data.py: words are visited in random order, each begins an n-gram of a drawn length, which
is shortened word by word while it exceeds what the count still allows. If even the single word exceeds it, or any word
was chosen before, the visit has no effect.

Quirk left: in the released code an n-gram can extend across [SEP] into the next segment; here special tokens end it, as
the end of the sequence does there: a longer one is cut.

Shapes: T packed tokens, B sequences, b sequences that still choose, W words.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from bertkit.arrays import Int64Array
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.objectives.masking.base import Chosen, chosen_units, ranked
from bertkit.objectives.masking.words import WholeWordMasking


class Ngrams(WholeWordMasking):
    """N-grams in random order until the count is reached."""

    name: Literal["ngrams"] = "ngrams"
    longest: int = Field(3, ge=1, description="Maximum n-gram length in words.")

    def choose(self, samples: Samples, vocabulary: Vocabulary, counts_B: Int64Array, draw: Draw) -> Chosen:
        words = self.words(samples, vocabulary)
        drawn_W = self.drawn(samples.uniform_T(draw, "mask/length")[words.start_W])
        number_W = np.minimum(drawn_W, words.end_W - np.arange(drawn_W.size))
        key_W = samples.uniform_T(draw, "mask/choose")[words.start_W]
        subwords_W1 = np.concatenate([[0], np.cumsum(words.length_W)])
        covered_W = np.zeros(drawn_W.size + self.longest, dtype=np.bool_)
        taken_W = np.zeros(drawn_W.size, dtype=np.int64)
        left_B = counts_B.copy()
        for visited_B in ranked(key_W, words.sequence_W, left_B.size):
            sequence_b = np.flatnonzero((visited_B >= 0) & (left_B > 0))
            if not sequence_b.size:
                break
            word_b, left_b = visited_B[sequence_b], left_B[sequence_b]
            number_b = number_W[word_b]
            for _ in range(self.longest - 1):
                number_b = number_b - (subwords_W1[word_b + number_b] - subwords_W1[word_b] > left_b) * (number_b > 1)
            size_b = subwords_W1[word_b + number_b] - subwords_W1[word_b]
            effective_b = size_b <= left_b
            for offset in range(self.longest):
                effective_b &= ~(covered_W[word_b + offset] & (offset < number_b))
            word_b, number_b = word_b[effective_b], number_b[effective_b]
            for offset in range(self.longest):
                covered_W[word_b[offset < number_b] + offset] = True
            taken_W[word_b] = number_b
            left_B[sequence_b[effective_b]] -= size_b[effective_b]
        word_U = np.flatnonzero(taken_W)
        return chosen_units(words.start_W[word_U], subwords_W1[word_U + taken_W[word_U]] - subwords_W1[word_U])

    def drawn(self, uniform_W: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Int64Array:
        """Lengths in words, from uniform numbers in [0, 1)."""
        weight_N = 1.0 / np.arange(1, self.longest + 1)
        drawn_W: Int64Array = 1 + np.searchsorted(np.cumsum(weight_N / weight_N.sum())[:-1], uniform_W, side="right")
        return drawn_W
