"""Denoising: reconstruct a text from one with shuffled sentences and with masks in place of spans.

Lewis et al. 2020, BART, arXiv:1910.13461, section 2.2 (text infilling and sentence permutation, used for the large
model in section 5); details as in fairseq's DenoisingDataset. Span lengths have a Poisson distribution; each span is
replaced by one [MASK], and a span of length 0 inserts one. Lengths are counted in words if the vocabulary marks their
beginnings.

Quirks honoured: spans may overlap and reach the text's end, so somewhat fewer words than the rate are masked; the last
length is cut to the remainder of the rate. Quirks left: fairseq's sentences end at full stops of GPT-2's vocabulary,
here they are the corpus's segments; its decoder begins with </s> and predicts <s> first; it can fill a share of the
masks with random tokens (`--mask-random`), which the paper does not mention. A source never becomes longer than its
text, as it could with many spans of length 0.

Shapes: S tokens of a text without special ones, K spans.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, PrivateAttr

from bertkit.arrays import Float64Array, Int64Array
from bertkit.data.random import Draw
from bertkit.data.samples import Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.objectives.seq2seq_lm import DocumentRecovery, Sides
from bertkit.text.tokenizer import Tokenizer

_LONGEST = 128
"""The probability of lengths from here on is treated as zero."""


class Denoising(DocumentRecovery):
    """Reconstruct the text from its corrupted form."""

    rate: float = Field(0.3, gt=0, lt=1, description="Share of a text's words that is masked.")
    mean_span: float = Field(
        3.0,
        ge=0.1,
        le=50,
        description="Mean of the Poisson distribution of span lengths in words; a span may have 0 words.",
    )
    permute_sentences: bool = Field(True, description="Whether the sentences of the source are in random order.")

    _shards: TokenShards | None = PrivateAttr(None)

    term: ClassVar[str] = "denoising"

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        self.require_mask(tokenizer)
        prepared = self.model_copy()
        prepared._shards = shards
        return prepared

    def expected_count(self, length: int) -> float:
        """The whole text and the token that ends it."""
        return max(1.0, length - 1.0)

    def sample_tokens(self, length: int) -> float:
        """The text, and its remainder with one mask per span."""
        return 2.0 * length - self.rate * length * (1 - 1 / max(1.0, self.mean_span))

    def sides(
        self, ids_S: Int64Array, place_S: Int64Array, vocabulary: Vocabulary, draw: Draw, at: dict[str, Any]
    ) -> Sides:
        """The corrupted text and the text."""
        source = ids_S
        if self.permute_sentences:
            assert self._shards is not None, "prepared() gives the corpus"
            sentence_S = np.searchsorted(self._shards.segment_start_S1, place_S, side="right")
            source = ids_S[sentence_order(sentence_S, draw, at)]
        return Sides(self._infilled(source, vocabulary, draw, at), ids_S, place_S)

    def _infilled(self, ids_S: Int64Array, vocabulary: Vocabulary, draw: Draw, at: dict[str, Any]) -> Int64Array:
        """The text with each span of words replaced by a mask, and masks inserted for spans of length 0."""
        starts_word_S = vocabulary.word_start_V[ids_S].copy()
        starts_word_S[:1] = True
        word_starts = np.flatnonzero(starts_word_S)
        spans_K = self.span_lengths(math.ceil(self.rate * word_starts.size), draw, at)
        inserted = int((spans_K == 0).sum())
        words_K = spans_K[spans_K > 0][: word_starts.size]
        first_K = np.argsort(draw.uniform("denoising/start", **at, position=np.arange(word_starts.size)), kind="stable")
        masked_S = np.zeros(ids_S.size, dtype=np.bool_)
        gone_S = np.zeros(ids_S.size, dtype=np.bool_)
        ends = np.append(word_starts, ids_S.size)
        for first, words in zip(first_K, words_K, strict=False):
            masked_S[word_starts[first]] = True
            gone_S[word_starts[first] + 1 : ends[min(first + words, word_starts.size)]] = True
        source = np.where(masked_S, vocabulary.mask_id, ids_S)[~gone_S]
        inserted = min(inserted, int(gone_S.sum()))
        gap_K = draw.integers("denoising/gap", source.size + 1, **at, position=np.arange(inserted))
        return np.insert(source, np.sort(gap_K), vocabulary.mask_id)

    def span_lengths(self, words: int, draw: Draw, at: dict[str, Any]) -> Int64Array:
        """Lengths of spans, (K,), that add up to `words`; the last is cut."""
        drawn = np.zeros(0, dtype=np.int64)
        chance = np.cumsum(_poisson(self.mean_span))
        while drawn.sum() < words:
            uniform = draw.uniform("denoising/length", **at, position=drawn.size + np.arange(words))
            drawn = np.append(drawn, np.searchsorted(chance, uniform * chance[-1], side="right"))
        before = np.cumsum(drawn) - drawn
        kept = drawn[before < words]
        kept[-1] = words - before[kept.size - 1]
        return kept


def sentence_order(sentence_S: Int64Array, draw: Draw, at: dict[str, Any]) -> Int64Array:
    """An order of tokens, (S,), in which sentences are shuffled and each keeps its tokens' order.

    Args:
        sentence_S: the number of each token's sentence, ascending.
        draw: of the run.
        at: the sample's address.
    """
    _, number_S = np.unique(sentence_S, return_inverse=True)
    count = int(number_S[-1]) + 1 if number_S.size else 0
    key = draw.uniform("denoising/sentence", **at, position=np.arange(count))
    return np.argsort(key[number_S], kind="stable") if count else number_S


def _poisson(mean: float) -> Float64Array:
    """The probability of each length."""
    length = np.arange(_LONGEST)
    log_factorial = np.array([math.lgamma(each + 1) for each in length])
    return np.asarray(np.exp(length * math.log(mean) - mean - log_factorial))
