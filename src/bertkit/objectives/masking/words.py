"""Whole words: all subwords of a word are predicted together.

Whole-word masking of google-research/bert (README of 31 May 2019; no paper), an option of Devlin et al. 2019,
arXiv:1810.04805. Quirks honoured: words are visited in random order, and a word with more subwords than the count still
allows is skipped, so the count is never exceeded and not always reached; whether a token is masked, replaced or kept is
drawn for each token. MPNet (Song et al. 2020, arXiv:2004.09297) cuts the word instead, as `span_perm` of its code.

Shapes: T packed tokens, B sequences, W words, b spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr

from bertkit.arrays import Int64Array
from bertkit.data.config import DataConfig
from bertkit.data.layouts import LaneLayout
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.objectives.masking.base import Chosen, MaskingStrategy, chosen_units, within_budget
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.words import WordMarks


@dataclass(frozen=True)
class BatchWords:
    """The words of a batch that may be chosen, in order.

    Attributes:
        start_W: packed position of each word's first subword.
        length_W: its number of subwords.
        sequence_W: its sequence.
        end_W: the number of the word after the last one that follows without a break; special tokens are breaks.
        word_T: the word of each token, -1 for fixed tokens.
    """

    start_W: Int64Array
    length_W: Int64Array
    sequence_W: Int64Array
    end_W: Int64Array
    word_T: Int64Array

    @classmethod
    def of(cls, samples: Samples, marks: WordMarks) -> BatchWords:
        """The words of these samples; fixed tokens belong to no word."""
        fixed_T = samples.fixed_T
        behind_fixed_T = np.concatenate([[True], fixed_T[:-1]])[: fixed_T.size] | (samples.position_T == 0)
        begins_T = marks.begins_T(samples.ids_T, behind_fixed_T) & ~fixed_T
        start_W = np.flatnonzero(begins_T)
        word_T = np.where(fixed_T, -1, np.cumsum(begins_T) - 1)
        length_W = np.bincount(word_T[~fixed_T], minlength=start_W.size)
        break_W = np.flatnonzero(behind_fixed_T[start_W])
        end_W = np.append(break_W, start_W.size)[np.cumsum(behind_fixed_T[start_W])]
        return cls(start_W, length_W, samples.sequence_T[start_W], end_W, word_T)

    def spans(self, anchor_b: Int64Array, number_b: Int64Array) -> tuple[Int64Array, Int64Array]:
        """First token and length of spans of this many words that begin with the anchors' words, up to a break."""
        first_b = self.word_T[anchor_b]
        last_b = np.minimum(first_b + number_b, self.end_W[first_b]) - 1
        start_b = self.start_W[first_b]
        return start_b, self.start_W[last_b] + self.length_W[last_b] - start_b


class WholeWordMasking(MaskingStrategy):
    """A strategy that never splits a word."""

    _marks: WordMarks | None = PrivateAttr(None)

    def errors(self, data: DataConfig) -> list[str]:
        if not (isinstance(data.layout, LaneLayout) and data.layout.bidirectional):
            return []
        return [
            f"units masks whole words, whose subwords come before their beginning where the layout {data.layout.choice}"
            " reads from right to left; set data.layout.bidirectional: false, or take units pieces"
        ]

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        prepared = self.model_copy()
        prepared._marks = WordMarks.of(tokenizer)
        return prepared

    def words(self, samples: Samples, vocabulary: Vocabulary) -> BatchWords:
        """The words of a batch; before `prepared`, only by the marks of subwords."""
        marks = WordMarks.plain(vocabulary.word_start_V) if self._marks is None else self._marks
        return BatchWords.of(samples, marks)


class Words(WholeWordMasking):
    """Words in random order until the count is reached."""

    name: Literal["words"] = "words"
    cut: bool = Field(
        False,
        description="Whether the word that would exceed the count is cut: its last subwords are predicted, so that the"
        " count is always reached, as in MPNet. Otherwise it is skipped, as in BERT.",
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"cut"})

    def choose(self, samples: Samples, vocabulary: Vocabulary, counts_B: Int64Array, draw: Draw) -> Chosen:
        words = self.words(samples, vocabulary)
        order_W = np.lexsort((samples.uniform_T(draw, "mask/choose")[words.start_W], words.sequence_W))
        length_W, sequence_W = words.length_W[order_W], words.sequence_W[order_W]
        if self.cut:
            before_W = np.cumsum(length_W) - length_W
            before_W -= before_W[np.searchsorted(sequence_W, sequence_W)]  # of the same sequence
            kept_W = np.clip(counts_B[sequence_W] - before_W, 0, length_W)
            return chosen_units(words.start_W[order_W] + length_W - kept_W, kept_W)
        taken_W = order_W[within_budget(length_W, sequence_W, counts_B)]
        return chosen_units(words.start_W[taken_W], words.length_W[taken_W])
