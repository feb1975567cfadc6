"""Entities and chunks from tags, and their F1, in two variants that differ on ill-formed sequences.

`conlleval`: the script of CoNLL-2000 and 2003 (Tjong Kim Sang and Buchholz 2000): any I- that does not continue a chunk
opens one, so IOB1, IOB2 and BIOES are read alike. `strict_iob2`: a chunk begins with B-, only I- of its type continues
it, and any other I- belongs to no chunk. On well-formed IOB2 the two agree. Published NER scores are from conlleval;
report the variant with the figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bertkit.arrays import Float64Array
from bertkit.errors import DataError
from bertkit.metrics.base import Additive, Scores, check_aligned, ratio

Tags = Sequence[str]

NO_TYPE = "_"
"""The type of a chunk whose tags have none, such as "B"."""
_BIOES_OF = {"U": "S", "L": "E"}


class TaggedSpan(NamedTuple):
    """A chunk of the tokens from `start` up to, but not including, `stop`."""

    type: str
    start: int
    stop: int


def split_tag(tag: str) -> tuple[str, str]:
    """Prefix (one of B, I, O, E and S) and type; BILOU's U and L are read as S and E.

    Raises:
        DataError: anything else, such as a type without prefix.
    """
    prefix, dash, kind = tag.partition("-")
    prefix = _BIOES_OF.get(prefix, prefix)
    if prefix not in ("B", "I", "O", "E", "S") or (prefix == "O" and dash):
        raise DataError(
            f"tag {tag!r} is neither O nor a prefix B, I, E or S with a type, such as B-PER; "
            + (
                "write the names that the numbers stand for (hub:ORG/NAME reads them)"
                if tag.isdigit()
                else "tags that mark no chunks, such as parts of speech, are scored by accuracy:"
                " --set 'task.metrics=[accuracy]'"
            )
        )
    return prefix, "" if prefix == "O" else kind or NO_TYPE


def conlleval_spans(tags: Tags) -> list[TaggedSpan]:
    """Chunks by the rules of conlleval, with S- as a chunk of one token.

    A chunk continues only if the type is the same and the prefix is I or E; it ends with an E or S.
    """
    spans: list[TaggedSpan] = []
    start, previous, current = 0, "O", ""
    for index, tag in enumerate((*tags, "O")):
        prefix, kind = split_tag(tag)
        continues = previous in ("B", "I") and prefix in ("I", "E") and kind == current
        if not continues:
            if previous != "O":
                spans.append(TaggedSpan(current, start, index))
            start = index
        previous, current = prefix, kind
    return spans


def iob2_spans(tags: Tags) -> list[TaggedSpan]:
    """Chunks of well-formed IOB2 only: a B- and the I- of its type that follow. Any other I- is ignored.

    Raises:
        DataError: a prefix that IOB2 does not have.
    """
    spans: list[TaggedSpan] = []
    open_span: TaggedSpan | None = None
    for index, tag in enumerate(tags):
        prefix, kind = split_tag(tag)
        if prefix in ("E", "S"):
            raise DataError(f"tag {tag!r} does not belong to IOB2; score with conlleval")
        if prefix == "I" and open_span is not None and kind == open_span.type:
            open_span = open_span._replace(stop=index + 1)
            continue
        if open_span is not None:
            spans.append(open_span)
        open_span = TaggedSpan(kind, index, index + 1) if prefix == "B" else None
    return spans if open_span is None else [*spans, open_span]


def check_sentences(predictions: Sequence[Tags], references: Sequence[Tags]) -> None:
    """Refuse lists without exactly one tag per word. Words that are truncated need the tag O.

    Raises:
        DataError: a different number of sentences, or of tags in one of them.
    """
    check_aligned(predictions, references)
    for index, (predicted, gold) in enumerate(zip(predictions, references, strict=True)):
        if isinstance(predicted, str) or isinstance(gold, str):
            raise DataError(f"sentence {index} is text, not a list of tags; pass one list per sentence")
        if len(predicted) != len(gold):
            raise DataError(
                f"sentence {index}: {len(predicted)} predicted tags for {len(gold)} words; words that were cut "
                "off by truncation need the tag O"
            )


class ChunkF1(Additive):
    """F1 of chunks; a row is a sentence's counts of correct, predicted and gold chunks."""

    name = "f1"

    def __init__(self, spans: Callable[[Tags], list[TaggedSpan]] = conlleval_spans) -> None:
        """`spans` reads a sentence's chunks from its tags."""
        self.spans = spans

    def rows(self, predictions: Sequence[Tags], references: Sequence[Tags]) -> Float64Array:
        check_sentences(predictions, references)
        counts = []
        for predicted_tags, gold_tags in zip(predictions, references, strict=True):
            predicted, gold = set(self.spans(predicted_tags)), set(self.spans(gold_tags))
            counts.append((len(predicted & gold), len(predicted), len(gold)))
        return np.array(counts, dtype=float)

    def value(self, totals: Float64Array) -> Float64Array:
        return ratio(2 * totals[..., 0], totals[..., 1] + totals[..., 2])

    def precision_recall_f1(self, predictions: Sequence[Tags], references: Sequence[Tags]) -> tuple[float, ...]:
        """All three, each 0 if its denominator is zero."""
        totals = self.rows(predictions, references).sum(axis=0)
        right, predicted, gold = totals
        return float(ratio(right, predicted)), float(ratio(right, gold)), float(self.value(totals))


class ChunkPrecision(ChunkF1):
    """The share of predicted chunks that are correct."""

    name = "precision"

    def value(self, totals: Float64Array) -> Float64Array:
        return ratio(totals[..., 0], totals[..., 1])


class ChunkRecall(ChunkF1):
    """The share of gold chunks that are predicted."""

    name = "recall"

    def value(self, totals: Float64Array) -> Float64Array:
        return ratio(totals[..., 0], totals[..., 2])


class TagAccuracy(Additive):
    """The share of words with the correct tag; a row is a sentence's number of correct words and of all words."""

    name = "accuracy"

    def rows(self, predictions: Sequence[Tags], references: Sequence[Tags]) -> Float64Array:
        check_sentences(predictions, references)
        pairs = zip(predictions, references, strict=True)
        return np.array([[sum(map(str.__eq__, guess, gold)), len(gold)] for guess, gold in pairs], dtype=float)

    def value(self, totals: Float64Array) -> Float64Array:
        return ratio(totals[..., 0], totals[..., 1])


def conlleval(predictions: Sequence[Tags], references: Sequence[Tags]) -> Scores:
    """`{"precision", "recall", "f1", "accuracy"}` over all types, by the rules of conlleval."""
    precision, recall, f1 = ChunkF1().precision_recall_f1(predictions, references)
    return {"precision": precision, "recall": recall, "f1": f1, **tag_accuracy(predictions, references)}


def strict_iob2(predictions: Sequence[Tags], references: Sequence[Tags]) -> Scores:
    """`{"strict_precision", "strict_recall", "strict_f1"}` over all types, for well-formed IOB2 only."""
    precision, recall, f1 = ChunkF1(iob2_spans).precision_recall_f1(predictions, references)
    return {"strict_precision": precision, "strict_recall": recall, "strict_f1": f1}


def tag_accuracy(predictions: Sequence[Tags], references: Sequence[Tags]) -> Scores:
    """`{"accuracy"}`: the share of words whose whole tag is correct, for any kind of tags."""
    return {"accuracy": TagAccuracy().score(predictions, references)}
