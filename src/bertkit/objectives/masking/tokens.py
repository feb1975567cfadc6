"""Single tokens: an exact count of them, chosen uniformly without replacement.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1; released create_pretraining_data.py without whole-word masking.

Shapes: T packed tokens, B sequences, M chosen tokens.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from bertkit.arrays import Int64Array
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.objectives.masking.base import Chosen, MaskingStrategy


class Tokens(MaskingStrategy):
    """Every token is a unit of its own."""

    name: Literal["pieces"] = "pieces"

    def choose(self, samples: Samples, vocabulary: Vocabulary, counts_B: Int64Array, draw: Draw) -> Chosen:
        # With one uniform number per candidate, the k smallest are a uniform choice of k without replacement.
        order_T = np.lexsort(
            (np.where(samples.fixed_T, 2.0, samples.uniform_T(draw, "mask/choose")), samples.sequence_T)
        )
        # The sort keeps sequences in order, so a token's rank is its position within its sequence.
        chosen_T = (samples.position_T < counts_B[samples.sequence_T]) & ~samples.fixed_T[order_T]
        return Chosen(np.sort(order_T[chosen_T]))
