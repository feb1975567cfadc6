"""Single tokens; rare tokens of the corpus are chosen more often.

Sanh et al. 2019, DistilBERT, arXiv:1910.01108, whose released distiller.py follows XLM (Lample and Conneau 2019,
arXiv:1901.07291): positions are drawn without replacement, with probabilities proportional to count^-0.7 of their token
in the corpus; a token that never occurs counts as occurring once. In BERT's masking, sibling tokens.py, every position
is equally likely.

Quirk left: the released code draws from all tokens of a batch at once and rounds their number up; here every sequence
has its own share, so the other samples of a batch do not affect how a sample is masked.

Shapes: T packed tokens, B sequences, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr

from bertkit.arrays import Float64Array, Int64Array
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.objectives.masking.base import Chosen, MaskingStrategy, smallest
from bertkit.text.tokenizer import Tokenizer


class RareTokens(MaskingStrategy):
    """An exact count of tokens, drawn without replacement in proportion to a power of their rarity."""

    name: Literal["rare"] = "rare"
    exponent: float = Field(
        0.7, ge=0, description="Exponent: a token's weight is its count in the corpus to the power of minus this."
    )

    _weight_V: Float64Array | None = PrivateAttr(None)

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        prepared = self.model_copy()
        prepared._weight_V = np.maximum(shards.token_counts_V, 1).astype(np.float64) ** -self.exponent
        return prepared

    def choose(self, samples: Samples, vocabulary: Vocabulary, counts_B: Int64Array, draw: Draw) -> Chosen:
        assert self._weight_V is not None, "prepared() counts the corpus"
        # Waiting times at rates w: the k shortest are a draw of k without replacement in proportion to w
        # (Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir").
        waits_T = -np.log1p(-samples.uniform_T(draw, "mask/choose")) / self._weight_V[samples.ids_T]
        return Chosen(np.flatnonzero(smallest(waits_T, ~samples.fixed_T, counts_B, samples)))
