"""Short spans of tokens that cover the whole text, preferring those that were masked least often in earlier epochs.

Charpentier and Samuel 2024, GPT-BERT, arXiv:2410.24159; procedure of the released pretraining/dataset.py: the text is
divided into spans of 1 to `longest` tokens, each length equally likely, with one uniform number u per span; a token
that was predicted c times before has the key u e^c, and the tokens with the smallest keys are chosen. One draw decides
for a whole span whether it is masked, replaced or kept.

There the dataset stores the counts c. Here a sample's choices in earlier epochs are recomputed from their draws, so
they are a function of seed, epoch and sample, for any number of workers and after any resume. Sibling spans.py is
SpanBERT's, in words and without counts.

Quirks honoured: the masking rate is a share of the ordinary tokens; counts are reset with every stage. Quirks left: the
count is rounded to the nearest, not up or down at random, and the last span is cut when it is reached; earlier epochs
are recomputed at the current masking rate, and as if no sample had been causal; counts are also reset every 16 epochs,
since the work would otherwise grow with the epochs.

Shapes: T packed tokens, B sequences, M chosen tokens.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from bertkit.arrays import Float64Array, Int64Array
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.objectives.masking.base import Chosen, MaskingStrategy, smallest

REMEMBERED_EPOCHS = 16
"""Number of epochs after which all counts are reset."""


class TiledSpans(MaskingStrategy):
    """Adjacent spans that cover the text, chosen at random and by how often their tokens were chosen before."""

    name: Literal["tiled-spans"] = "tiled-spans"
    longest: int = Field(3, ge=1, description="Maximum span length in tokens.")

    replaced_as_one: ClassVar[bool] = True

    def errors(self, data: DataConfig) -> list[str]:
        found = []
        if data.layout.epoch_dependent:
            found.append(
                f"units.name: {self.name} counts how often a token was masked, but the layout {data.layout.choice}"
                " makes other samples in every epoch; set data.layout.name: full-sentences, or units.name: spans"
            )
        if data.static_copies is not None:
            found.append(
                f"units.name: {self.name} counts how often a token was masked, but data.static_copies:"
                f" {data.static_copies} repeats the same masks; set data.static_copies: null, or units.name: spans"
            )
        return found

    def counts_B(self, rate: float, lengths_B: Int64Array, ordinary_B: Int64Array) -> Int64Array:
        """The rate times the number of ordinary tokens, rounded, and at least one."""
        counts_B: Int64Array = np.maximum(1, np.rint(rate * ordinary_B)).astype(np.int64)
        return counts_B

    def choose(self, samples: Samples, vocabulary: Vocabulary, counts_B: Int64Array, draw: Draw) -> Chosen:
        place_B = samples.epoch_B % REMEMBERED_EPOCHS
        times_T = np.zeros(samples.ids_T.size, dtype=np.int64)
        chosen_T = np.zeros(samples.ids_T.size, dtype=np.bool_)
        first_T = np.zeros(samples.ids_T.size, dtype=np.int64)
        for place in range(int(place_B.max(initial=-1)) + 1):
            # Samples of a batch may be from two epochs: each takes part until its own.
            epoch_B = samples.epoch_B - place_B + place
            takes_part_T = (place_B >= place)[samples.sequence_T]
            span_first_T, uniform_T = self._spans(samples, epoch_B, draw)
            now_T = smallest(uniform_T * np.exp(times_T), ~samples.fixed_T, counts_B, samples) & takes_part_T
            times_T += now_T
            is_own_T = (place_B == place)[samples.sequence_T]
            chosen_T |= now_T & is_own_T
            first_T = np.where(is_own_T, span_first_T, first_T)
        index_M = np.flatnonzero(chosen_T)
        return Chosen(index_M, first_T[index_M])

    def _spans(self, samples: Samples, epoch_B: Int64Array, draw: Draw) -> tuple[Int64Array, Float64Array]:
        """For each token in an epoch, the packed position of its span's first token, and the span's uniform number.

        A special token ends a span, so none reaches from one document into the next.
        """
        at = {"epoch": epoch_B[samples.sequence_T], "sample": samples.sample_B[samples.sequence_T]}
        # The k-th length of a sequence has position k as its address; only spans that begin inside are used.
        length_T = 1 + draw.integers("mask/length", self.longest, **at, position=samples.position_T)
        sum_T = np.cumsum(length_T) - length_T
        begin_T = sum_T - sum_T[samples.cu_seqlens_B1[:-1]][samples.sequence_T]
        inside_T = begin_T < samples.lengths_B[samples.sequence_T]
        starts_T = samples.special_T.copy()
        starts_T[1:] |= samples.special_T[:-1]
        starts_T[(begin_T + samples.cu_seqlens_B1[samples.sequence_T])[inside_T]] = True
        first_T = np.flatnonzero(starts_T)[np.cumsum(starts_T) - 1]
        return first_T, draw.uniform("mask/choose", **at, position=samples.position_T[first_T])
