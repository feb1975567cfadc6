"""Entities and chunks from tags, and their F1, in two flavours that differ on ill-formed sequences.

`conlleval`: the script of CoNLL-2000 and 2003 (Tjong Kim Sang and Buchholz 2000): any I- that does not continue a chunk
opens one, so that IOB1, IOB2 and BIOES are read alike. `iob2` and `bioes` are strict: a chunk begins with B- (or S-),
only what follows by the rules belongs to it, and the rest is no chunk. On well-formed tags each agrees with conlleval.
Published NER scores are conlleval's; report the flavour with the figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bertkit.errors import DataError, UsageError
from bertkit.metrics.base import Additive, Floats, Scores, check_aligned, ratio

Tags = Sequence[str]

NO_TYPE = "_"
"""The type of a chunk whose tags name none, such as "B"."""
_BIOES_OF = {"U": "S", "L": "E"}


class Span(NamedTuple):
    """A chunk of the tokens `start` to `stop`, the latter not included."""

    type: str
    start: int
    stop: int


def split_tag(tag: str) -> tuple[str, str]:
    """Prefix, one of B, I, O, E and S, and type; BILOU's U and L are read as S and E.

    Raises:
        DataError: anything else, such as a type without prefix.
    """
    prefix, dash, kind = tag.partition("-")
    prefix = _BIOES_OF.get(prefix, prefix)
    if prefix not in ("B", "I", "O", "E", "S") or (prefix == "O" and dash):
        raise DataError(f"tag {tag!r} is not O or a prefix of B, I, E, S with a type, such as B-PER")
    return prefix, "" if prefix == "O" else kind or NO_TYPE


def conlleval_spans(tags: Tags) -> list[Span]:
    """Chunks by conlleval's rules, with S- as a chunk of one token.

    A chunk goes on only while its type stays and the prefix is I or E; it ends with an E or S.
    """
    spans: list[Span] = []
    start, previous, current = 0, "O", ""
    for index, tag in enumerate((*tags, "O")):
        prefix, kind = split_tag(tag)
        goes_on = previous in ("B", "I") and prefix in ("I", "E") and kind == current
        if not goes_on:
            if previous != "O":
                spans.append(Span(current, start, index))
            start = index
        previous, current = prefix, kind
    return spans


def iob2_spans(tags: Tags) -> list[Span]:
    """Chunks of well-formed IOB2 alone: a B- and the I- of its type that follow. Any other I- is no part of a chunk.

    Raises:
        DataError: a prefix that IOB2 does not have.
    """
    spans: list[Span] = []
    open_span: Span | None = None
    for index, tag in enumerate(tags):
        prefix, kind = split_tag(tag)
        if prefix in ("E", "S"):
            raise DataError(f"tag {tag!r} is not of the scheme IOB2; score with the scheme bioes or conlleval")
        if prefix == "I" and open_span is not None and kind == open_span.type:
            open_span = open_span._replace(stop=index + 1)
            continue
        if open_span is not None:
            spans.append(open_span)
        open_span = Span(kind, index, index + 1) if prefix == "B" else None
    return spans if open_span is None else [*spans, open_span]


def bioes_spans(tags: Tags) -> list[Span]:
    """Chunks of well-formed BIOES (or BILOU) alone: S-, or B- ... E- of one type with I- between."""
    spans: list[Span] = []
    start, current = -1, ""
    for index, tag in enumerate(tags):
        prefix, kind = split_tag(tag)
        if prefix == "S":
            spans.append(Span(kind, index, index + 1))
        if prefix == "B":
            start, current = index, kind
        elif prefix in ("O", "S") or kind != current:
            start, current = -1, ""
        elif prefix == "E" and start >= 0:
            spans.append(Span(kind, start, index + 1))
            start, current = -1, ""
    return spans


SCHEMES: dict[str, Callable[[Tags], list[Span]]] = {
    "conlleval": conlleval_spans,
    "iob2": iob2_spans,
    "bioes": bioes_spans,
}
"""How tags become chunks, by name. IOB1 has no strict reading of its own: conlleval's is its definition."""


def spans_reader(scheme: str) -> Callable[[Tags], list[Span]]:
    """The function of SCHEMES.

    Raises:
        UsageError: an unknown name.
    """
    if scheme not in SCHEMES:
        raise UsageError(f"unknown tagging scheme {scheme!r}; one of: {', '.join(SCHEMES)} (iob1 is read by conlleval)")
    return SCHEMES[scheme]


def iob1_tags(spans: Iterable[Span], length: int) -> list[str]:
    """IOB1 as in CoNLL-2003's files: I-, and B- only where a chunk follows another of its type directly."""
    tags, previous = ["O"] * length, Span("", -1, -1)
    for span in sorted(spans, key=lambda each: each.start):
        for index in range(span.start, span.stop):
            tags[index] = f"I-{span.type}"
        if previous.stop == span.start and previous.type == span.type:
            tags[span.start] = f"B-{span.type}"
        previous = span
    return tags


def iob2_tags(spans: Iterable[Span], length: int) -> list[str]:
    """IOB2: B- on the first token of every chunk, I- on the others."""
    tags = ["O"] * length
    for span in spans:
        for index in range(span.start, span.stop):
            tags[index] = f"{'B' if index == span.start else 'I'}-{span.type}"
    return tags


def bioes_tags(spans: Iterable[Span], length: int) -> list[str]:
    """BIOES: S- on a chunk of one token; else B- first, E- last, I- between."""
    tags = iob2_tags(spans := list(spans), length)
    for span in spans:
        tags[span.stop - 1] = f"{'S' if span.stop - span.start == 1 else 'E'}-{span.type}"
    return tags


@dataclass(frozen=True, slots=True)
class ChunkCounts:
    """Chunks that are right, predicted and in the gold data."""

    right: int = 0
    found: int = 0
    gold: int = 0

    @property
    def precision(self) -> float:
        return self.right / self.found if self.found else 0.0

    @property
    def recall(self) -> float:
        return self.right / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        return 2 * self.right / (self.found + self.gold) if self.found + self.gold else 0.0


@dataclass(frozen=True)
class TagScores:
    """What conlleval reports: chunks by type and in all, and tokens."""

    types: dict[str, ChunkCounts]
    tokens: int
    right_tokens: int

    @property
    def overall(self) -> ChunkCounts:
        """The counts of all types together."""
        each = self.types.values()
        return ChunkCounts(sum(c.right for c in each), sum(c.found for c in each), sum(c.gold for c in each))

    @property
    def accuracy(self) -> float:
        """The share of tokens whose whole tag is right."""
        return self.right_tokens / self.tokens if self.tokens else 0.0

    def by_type(self) -> dict[str, Any]:
        """seqeval's dictionary: `{TYPE: {precision, recall, f1, number}, overall_f1, ...}`; number: gold chunks."""
        report: dict[str, Any] = {
            kind: {"precision": each.precision, "recall": each.recall, "f1": each.f1, "number": each.gold}
            for kind, each in self.types.items()
        }
        overall = self.overall
        report |= {"overall_precision": overall.precision, "overall_recall": overall.recall, "overall_f1": overall.f1}
        return report | {"overall_accuracy": self.accuracy}

    def text(self) -> str:
        """conlleval's report, in percent, with a newline at the end; the last column counts the predicted chunks."""
        overall = self.overall
        lines = [
            f"processed {self.tokens} tokens with {overall.gold} phrases; "
            f"found: {overall.found} phrases; correct: {overall.right}.",
            f"accuracy: {100 * self.accuracy:6.2f}%; {_percentages(overall)}",
            *(f"{kind:>17}: {_percentages(each)}  {each.found}" for kind, each in self.types.items()),
        ]
        return "\n".join(lines) + "\n"


def _percentages(counts: ChunkCounts) -> str:
    precision, recall, f1 = (100 * value for value in (counts.precision, counts.recall, counts.f1))
    return f"precision: {precision:6.2f}%; recall: {recall:6.2f}%; FB1: {f1:6.2f}"


def score_tags(predictions: Sequence[Tags], references: Sequence[Tags], scheme: str = "conlleval") -> TagScores:
    """Count chunks and tokens of tagged sentences.

    Args:
        predictions: the tags of each sentence. Words that truncation cut off must be there, as O.
        references: the gold tags, sentence by sentence.
        scheme: how tags become chunks, a name in SCHEMES.

    Raises:
        DataError: another number of sentences or of tags in one, or a tag that is none.
        UsageError: an unknown scheme.
    """
    read = spans_reader(scheme)
    _check_sentences(predictions, references)
    right: Counter[str] = Counter()
    found: Counter[str] = Counter()
    gold: Counter[str] = Counter()
    tokens = right_tokens = 0
    for guessed_tags, gold_tags in zip(predictions, references, strict=True):
        guessed_spans, gold_spans = set(read(guessed_tags)), set(read(gold_tags))
        found.update(span.type for span in guessed_spans)
        gold.update(span.type for span in gold_spans)
        right.update(span.type for span in guessed_spans & gold_spans)
        tokens += len(gold_tags)
        right_tokens += sum(a == b for a, b in zip(guessed_tags, gold_tags, strict=True))
    types = {kind: ChunkCounts(right[kind], found[kind], gold[kind]) for kind in sorted(found | gold)}
    return TagScores(types, tokens, right_tokens)


def _check_sentences(predictions: Sequence[Tags], references: Sequence[Tags]) -> None:
    check_aligned(predictions, references)
    for index, (guessed_tags, gold_tags) in enumerate(zip(predictions, references, strict=True)):
        if isinstance(guessed_tags, str) or isinstance(gold_tags, str):
            raise DataError(f"sentence {index} is text, not a list of tags; pass one list per sentence")
        if len(guessed_tags) != len(gold_tags):
            raise DataError(
                f"sentence {index}: {len(guessed_tags)} predicted tags for {len(gold_tags)} words; words that were cut "
                "off by truncation need the tag O"
            )


class ChunkF1(Additive):
    """F1 of chunks; a row is a sentence's right, predicted and gold chunks."""

    name = "f1"

    def __init__(self, scheme: str = "conlleval") -> None:
        self.read = spans_reader(scheme)

    def rows(self, predictions: Sequence[Tags], references: Sequence[Tags]) -> Floats:
        _check_sentences(predictions, references)
        counts = []
        for guessed_tags, gold_tags in zip(predictions, references, strict=True):
            guessed_spans, gold_spans = set(self.read(guessed_tags)), set(self.read(gold_tags))
            counts.append((len(guessed_spans & gold_spans), len(guessed_spans), len(gold_spans)))
        return np.array(counts, dtype=float)

    def value(self, totals: Floats) -> Floats:
        return ratio(2 * totals[..., 0], totals[..., 1] + totals[..., 2])


def conlleval(predictions: Sequence[Tags], references: Sequence[Tags]) -> Scores:
    """`{"precision", "recall", "f1", "accuracy"}` over all types, by conlleval's rules."""
    scores = score_tags(predictions, references, "conlleval")
    overall = scores.overall
    return {
        "precision": overall.precision,
        "recall": overall.recall,
        "f1": overall.f1,
        "accuracy": scores.accuracy,
    }


def strict_iob2(predictions: Sequence[Tags], references: Sequence[Tags]) -> Scores:
    """`{"strict_precision", "strict_recall", "strict_f1"}` over all types, of well-formed IOB2 alone."""
    overall = score_tags(predictions, references, "iob2").overall
    return {"strict_precision": overall.precision, "strict_recall": overall.recall, "strict_f1": overall.f1}
