"""The interface of masking strategies, which choose the tokens to predict, and functions that several share.

Siblings: tokens.py (BERT), rare.py (DistilBERT), words.py (whole-word masking), ngrams.py (ALBERT), windowed_ngrams.py
(DeBERTa), spans.py (SpanBERT), entity_spans.py (its ablation), tiled_spans.py (GPT-BERT), phrases.py and annotated.py
(ERNIE). A unit is a group of tokens that is chosen as a whole. Each strategy follows the released procedure of its
paper for each sequence, computed for all sequences of a batch at once. The replacement of tokens and the loss are in
../masked_lm.py.

Shapes: T packed tokens, B sequences, M chosen tokens, C candidates, c remaining candidates, K candidates of the
sequence with the most, U chosen units.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from bertkit.arrays import BoolArray, Float64Array, Int64Array
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.settings import Settings
from bertkit.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Chosen:
    """The tokens to predict.

    Attributes:
        index_M: their packed positions, ascending.
        first_M: the packed position of the first token of each one's unit; None if every token is its own unit.
    """

    index_M: Int64Array
    first_M: Int64Array | None = None


class MaskingStrategy(Settings, ABC):
    """A way of choosing tokens. It consists of its settings: plain data that is sent to workers."""

    replaced_as_one: ClassVar[bool] = False
    """Whether one draw decides for all tokens of a unit whether they are masked, replaced or kept."""

    reads_annotated_spans: ClassVar[bool] = False
    """Whether it chooses spans that are annotated in the corpus."""

    def counts_B(self, rate: float, lengths_B: Int64Array, ordinary_B: Int64Array) -> Int64Array:
        """The number of tokens to choose: BERT's rule, which includes special tokens, and at least one.

        Args:
            rate: masking rate.
            lengths_B: tokens of each sequence.
            ordinary_B: those that may be chosen.
        """
        counts_B: Int64Array = np.maximum(1, np.rint(rate * lengths_B)).astype(np.int64)
        return counts_B

    def errors(self, data: DataConfig) -> list[str]:
        """Why it cannot mask these data: one sentence each, which begins with the key, `units.KEY`, with the remedy."""
        return []

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        """The strategy with what it needs from the vocabulary and the corpus.

        Raises:
            UsageError: if the tokenizer does not have what it needs.
            DataError: if a file in its settings is invalid.
        """
        return self

    @abstractmethod
    def choose(self, samples: Samples, vocabulary: Vocabulary, counts_B: Int64Array, draw: Draw) -> Chosen:
        """The tokens to predict, at most `counts_B` of each sequence and none of `samples.fixed_T`."""


def ranked(key_C: Float64Array, sequence_C: Int64Array, sequences: int) -> Int64Array:
    """Candidates in the order of their keys, (K, B): row k contains the k-th of every sequence, -1 if it has no more.

    Args:
        key_C: the keys.
        sequence_C: the sequence of each candidate.
        sequences: B.
    """
    order_C = np.lexsort((key_C, sequence_C))
    sorted_C = sequence_C[order_C]
    counts_B = np.bincount(sequence_C, minlength=sequences)
    starts_B = np.cumsum(counts_B) - counts_B
    ranked_KB = np.full((int(counts_B.max(initial=0)), sequences), -1, dtype=np.int64)
    ranked_KB[np.arange(order_C.size) - starts_B[sorted_C], sorted_C] = order_C
    return ranked_KB


def smallest(key_T: Float64Array, free_T: BoolArray, counts_B: Int64Array, samples: Samples) -> BoolArray:
    """As many of each sequence's free tokens as its count, those with the smallest keys; the first if tied.

    With one uniform number per token as the key, this is a uniform choice without replacement.
    """
    order_T = np.lexsort((key_T, ~free_T, samples.sequence_T))
    # The sort keeps sequences in order, so a token's rank is its position within its sequence.
    chosen_T = np.zeros(key_T.size, dtype=np.bool_)
    chosen_T[order_T] = (samples.position_T < counts_B[samples.sequence_T]) & free_T[order_T]
    return chosen_T


def within_budget(length_C: Int64Array, sequence_C: Int64Array, counts_B: Int64Array) -> BoolArray:
    """The candidates that are taken if each sequence takes its own in this order, skipping those that no longer fit.

    Args:
        length_C: tokens of each candidate; candidates do not overlap.
        sequence_C: the sequence of each candidate, ascending.
        counts_B: tokens that each sequence may take.
    """
    left_B = counts_B.copy()
    taken_C = np.zeros(length_C.size, dtype=np.bool_)
    remaining_C = np.arange(length_C.size)
    while True:
        remaining_C = remaining_C[length_C[remaining_C] <= left_B[sequence_C[remaining_C]]]
        if not remaining_C.size:
            return taken_C
        size_c, owner_c = length_C[remaining_C], sequence_C[remaining_C]
        sum_c = np.cumsum(size_c)
        first_c = np.concatenate([[True], owner_c[1:] != owner_c[:-1]])
        before_c = (sum_c - size_c)[first_c][np.cumsum(first_c) - 1]
        # Sums grow, so the candidates that fit come first in each sequence's list; the next one is skipped for good.
        fits_c = sum_c - before_c <= left_B[owner_c]
        taken_C[remaining_C[fits_c]] = True
        np.subtract.at(left_B, owner_c[fits_c], size_c[fits_c])
        remaining_C = remaining_C[~fits_c]


def spread(start_U: Int64Array, length_U: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The tokens of ranges, concatenated, and the number of each token's range."""
    range_M = np.repeat(np.arange(start_U.size), length_U)
    offset_U = np.cumsum(length_U) - length_U
    return np.arange(range_M.size) - offset_U[range_M] + start_U[range_M], range_M


def chosen_units(start_U: Int64Array, length_U: Int64Array) -> Chosen:
    """The tokens of units that do not overlap, given in any order."""
    order_U = np.argsort(start_U, kind="stable")
    index_M, unit_M = spread(start_U[order_U], length_U[order_U])
    return Chosen(index_M, start_U[order_U][unit_M])
