"""Span corruption: generate the spans that are missing from a text, each after the sentinel token in its place.

Raffel et al. 2020, T5, arXiv:1910.10683, section 3.1.4 and figure 2; counts and draws as in the released code's
`random_spans_noise_mask`, `noise_span_to_unique_sentinel` and `nonnoise_span_to_unique_sentinel`
(google-research/text-to-text-transfer-transformer, t5/data/preprocessors.py): 15% of the tokens in spans of 3 tokens on
average, all divisions equally likely, starting with text and ending with a span. The first span's sentinel is the
vocabulary's last token, <extra_id_0>.

    source    [CLS] Thank you <extra_id_0> me to your party <extra_id_1> [SEP]
    target    [CLS] <extra_id_0> for inviting <extra_id_1> last week [SEP]

Quirk honoured: there is no sentinel after the last span, unlike in figure 2, since a span always ends the text. Quirks
left: T5's sides end in </s>, and its target begins with [PAD]; here both are enclosed in [CLS] and [SEP].

Shapes: S tokens of a text without special ones, K spans.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, PrivateAttr

from bertkit.arrays import Int64Array
from bertkit.data.random import Draw
from bertkit.data.samples import Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.errors import UsageError
from bertkit.objectives.seq2seq_lm import DocumentRecovery, Sides
from bertkit.text.tokenizer import Tokenizer


class SpanCorruption(DocumentRecovery):
    """Predict the spans that were removed from the text."""

    rate: float = Field(0.15, gt=0, lt=1, description="Share of a text's tokens that is removed.")
    mean_span: float = Field(3.0, ge=1, le=1000, description="Mean span length in tokens.")

    _sentinels: tuple[int, ...] = PrivateAttr(())

    term: ClassVar[str] = "span_corruption"

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        if not tokenizer.sentinel_ids:
            raise UsageError(
                f"objective.{self.term} needs sentinel tokens for its spans (<extra_id_0>, ...), but the tokenizer has"
                " none; set tokenizer.sentinels: 100, or use a T5 tokenizer"
            )
        prepared = self.model_copy()
        prepared._sentinels = tokenizer.sentinel_ids
        return prepared

    def expected_count(self, length: int) -> float:
        """The missing tokens, one sentinel per span, and the token that ends the target."""
        missing = self.rate * length
        return max(1.0, missing + missing / self.mean_span + 1)

    def sample_tokens(self, length: int) -> float:
        """The text, two sentinels per span (one on each side), and the special tokens of the target."""
        return length + 2 * self.rate * length / self.mean_span + 2

    def sides(
        self, ids_S: Int64Array, place_S: Int64Array, vocabulary: Vocabulary, draw: Draw, at: dict[str, Any]
    ) -> Sides:
        """The remaining text and the missing spans."""
        span_K, text_K = self.span_lengths(ids_S.size, draw, at)
        standing_K = np.asarray(self._sentinels[: span_K.size])
        end_K = np.cumsum(span_K + text_K)
        begin_K = end_K - span_K
        missing_S = np.zeros(ids_S.size + 1, dtype=np.int64)
        missing_S[begin_K] += 1
        missing_S[end_K] -= 1
        is_missing_S = np.cumsum(missing_S[:-1]).astype(np.bool_)
        source = np.insert(ids_S, begin_K, standing_K)[~np.insert(is_missing_S, begin_K, False)]
        before = np.cumsum(span_K) - span_K
        return Sides(
            source,
            np.insert(ids_S[is_missing_S], before, standing_K),
            np.insert(place_S[is_missing_S], before, -1),
        )

    def span_lengths(self, length: int, draw: Draw, at: dict[str, Any]) -> tuple[Int64Array, Int64Array]:
        """Lengths of the missing spans and of the text before each, (K,), for a text of this many tokens.
        A text of one token cannot be divided, so its span is empty.
        """
        if length < 2:
            return np.zeros(1, dtype=np.int64), np.array([length])
        missing = min(max(round(length * self.rate), 1), length - 1)
        spans = min(max(round(missing / self.mean_span), 1), length - missing)
        if self._sentinels:
            spans = min(spans, len(self._sentinels))
        return (
            _divided(missing, spans, draw, "span_corruption/span", at),
            _divided(length - missing, spans, draw, "span_corruption/text", at),
        )


def _divided(items: int, parts: int, draw: Draw, purpose: str, at: dict[str, Any]) -> Int64Array:
    """Lengths of this many parts, each with at least one item, all divisions equally likely, (K,)."""
    key = draw.uniform(purpose, **at, position=np.arange(items - 1))
    ends = np.sort(np.argsort(key, kind="stable")[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], ends, [items]]))
