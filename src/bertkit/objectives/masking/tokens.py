"""Single tokens: an exact count of them, chosen uniformly without replacement.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1; released create_pretraining_data.py without whole-word masking.

Shapes: T packed tokens, B sequences.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from bertkit.arrays import Int64Array
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.objectives.masking.base import Chosen, MaskingStrategy, smallest


class Tokens(MaskingStrategy):
    """Every token is a unit of its own."""

    name: Literal["pieces"] = "pieces"

    def choose(self, samples: Samples, vocabulary: Vocabulary, counts_B: Int64Array, draw: Draw) -> Chosen:
        uniform_T = samples.uniform_T(draw, "mask/choose")
        return Chosen(np.flatnonzero(smallest(uniform_T, ~samples.fixed_T, counts_B, samples)))
