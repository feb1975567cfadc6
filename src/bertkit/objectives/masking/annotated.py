"""Annotated spans: phrases and entities that are marked in the corpus, masked as a whole or not at all.

Sun et al. 2019, ERNIE 1.0, arXiv:1904.09223, section 3.2, like phrases.py but closer to the paper, in which a chunker
and a tagger also marked the text beforehand. The spans are in fields of the corpus's records
(`data.reading.span_fields`) and are stored with the tokens (text/annotated.py); a span that a sample cuts off is
ignored.

A span consists of the tokens that overlap it, which may be parts of words; the rest of such a word counts as a separate
word. Spans are chosen as in phrases.py.

Shapes: T packed tokens, B sequences.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, PrivateAttr

from bertkit.arrays import BoolArray, Int64Array
from bertkit.data.config import DataConfig
from bertkit.data.layouts import LaneLayout
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.errors import UsageError
from bertkit.objectives.masking.base import Chosen
from bertkit.objectives.masking.phrases import draw_phrases
from bertkit.objectives.masking.words import WholeWordMasking
from bertkit.text.annotated import BEGINS, INSIDE
from bertkit.text.tokenizer import Tokenizer


class MarkedSpans(WholeWordMasking):
    """Masking that reads the spans of one field of the corpus's records."""

    field: str = Field(description="Which of data.reading.span_fields is used.")

    reads_annotated_spans: ClassVar[bool] = True

    _number: int | None = PrivateAttr(None)

    def errors(self, data: DataConfig) -> list[str]:
        fields = data.reading.span_fields
        known = data.is_tokenised or self.field in fields  # prepared() looks into token shards
        found = [] if known else [_not_there(self.field, fields, "data.reading.span_fields has")]
        return found + layout_errors(f"units.field {self.field!r}", data)

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        if self.field not in shards.span_fields:
            raise UsageError(_not_there(self.field, shards.span_fields, f"the token shards {shards.directory} have"))
        prepared = super().prepared(tokenizer, shards)
        prepared._number = shards.span_fields.index(self.field)
        return prepared

    def span_tokens(self, samples: Samples) -> tuple[BoolArray, BoolArray]:
        """Which tokens begin a span of the field, and which belong to one, including the first; each (T,)."""
        assert self._number is not None, "prepared() finds the field"
        assert samples.spans_T is not None, "layouts give the spans of shards that have some"
        free_T = ~samples.fixed_T
        marks_T = samples.spans_T >> 2 * self._number
        return (marks_T & BEGINS > 0) & free_T, (marks_T & INSIDE > 0) & free_T


class AnnotatedSpans(MarkedSpans):
    """Random spans of one field, then words until the count is reached."""

    name: Literal["annotated"] = "annotated"
    field: str = Field("spans", description="Which of data.reading.span_fields is used.")
    phrase_rate: float = Field(0.15, gt=0, le=1, description="Probability that a span is chosen.")

    def choose(self, samples: Samples, vocabulary: Vocabulary, counts_B: Int64Array, draw: Draw) -> Chosen:
        starts_T, inside_T = self.span_tokens(samples)
        words = self.words(samples, vocabulary)
        return draw_phrases(samples, words, starts_T, inside_T, self.phrase_rate, counts_B, draw)


def layout_errors(name: str, data: DataConfig) -> list[str]:
    """Why the layout does not give the marks that the named setting needs; empty if it does."""
    if not isinstance(data.layout, LaneLayout):
        return []
    return [
        f"{name} needs the marks of the text, which data.layout {data.layout.choice!r} does not read; use another"
        " layout, such as full-sentences"
    ]


def _not_there(field: str, fields: list[str] | tuple[str, ...], who: str) -> str:
    return (
        f"units.field is {field!r}, but {who} {', '.join(fields) or 'none'}; add the field of the"
        " corpus's records that contains the spans there, such as data.reading.span_fields: [spans]"
    )
