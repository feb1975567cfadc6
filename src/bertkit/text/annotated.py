"""Lines of text with annotated spans, from the record to the tokens.

Sun et al. 2019, ERNIE 1.0, arXiv:1904.09223, section 3.2, masks phrases and entities that a chunker and a tagger found
beforehand. A corpus with such annotations stores them next to its text as [start, end] in characters, end exclusive.
Not from a paper: lines are cut out of a document, sentences out of a line, tokens out of a sentence, and spans are
shifted along with their text at each step. Sibling lexicon.py finds phrases by a list.

Shapes: T tokens of a text, F fields with spans.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertkit.arrays import Int64Array
from bertkit.errors import DataError
from bertkit.text.sentences import without_space

Span = tuple[int, int]
"""The first character and the exclusive end."""

MOST_FIELDS = 4
"""Two bits of a byte mark the spans of one field."""

OUTCOMES = ("kept", "without_token", "across_segments", "overlapping")
"""Outcomes of an annotated span: it is kept; it has no token; it extends beyond its segment; it overlaps a longer one,
or one further left."""
_KEPT, _WITHOUT_TOKEN, _ACROSS, _OVERLAPPING = range(len(OUTCOMES))
CAPITALS = "capitals"
"""The field of words that begin with a capital letter, taken from the text itself."""
BEGINS, INSIDE = 1, 2
"""Marks of a token: the first token of a span; any token of a span, including the first."""

_LINE = re.compile(r"[^\r\n]+")
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")


class AnnotatedLine(str):
    """A line of text and the spans that begin in it.

    Attributes:
        spans: the spans of each field, in characters of the line. A span that continues in the next line ends beyond
            the end of this one; a span of blanks alone is empty.
    """

    spans: tuple[tuple[Span, ...], ...]

    def __new__(cls, text: str, spans: Iterable[Iterable[Span]]) -> AnnotatedLine:
        line = super().__new__(cls, text)
        line.spans = tuple(map(tuple, spans))
        return line

    def __reduce__(self) -> tuple[Any, ...]:
        return AnnotatedLine, (str(self), self.spans)


def with_capitals(line: str, fields: int) -> AnnotatedLine:
    """A line with its words that begin with a capital (or titlecase) letter as the spans of an additional field.

    Sun et al. 2019, ERNIE 2.0, arXiv:1907.12412, section 4.2.1 (capitalization prediction). A word is a run of letters,
    digits and underscores, with apostrophes inside.

    Args:
        line: with or without the spans of other fields.
        fields: number of other fields.
    """
    others = line.spans if isinstance(line, AnnotatedLine) else ((),) * fields
    own = [match.span() for match in _WORD.finditer(line) if match[0][0].isupper() or match[0][0].istitle()]
    return AnnotatedLine(str(line), [*others, own])


def spans_of(record: Mapping[str, Any], field: str, length: int, where: str) -> list[Span]:
    """The spans in a field of a record; null means none.

    Args:
        record: of the corpus.
        field: name of the field.
        length: number of characters of the record's text.
        where: the record, for messages.

    Raises:
        DataError: the field is missing, or is not a list of [start, end], or of records with `start` and `end`, with
            0 <= start < end <= length.
    """
    if field not in record:
        near = get_close_matches(field, list(record), n=3, cutoff=0.5) or sorted(record)[:10]
        raise DataError(
            f"{where}: no field {field!r}; there are: {', '.join(map(str, near)) or 'none'}; name it with"
            " data.reading.span_fields, and write [] if a record has no spans"
        )
    listed = record[field]
    if listed is None:
        return []
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise DataError(f"{where}: field {field!r} is {type(listed).__name__}, expected a list of [start, end]")
    spans = []
    for span in listed:
        if isinstance(span, Mapping):  # as `bertkit predict` writes entities
            span = [span.get("start"), span.get("end")]
        numbers = list(span) if isinstance(span, Sequence) and not isinstance(span, str) else []
        whole = len(numbers) == 2 and all(isinstance(each, int) and not isinstance(each, bool) for each in numbers)
        if not whole or not 0 <= numbers[0] < numbers[1] <= length:
            raise DataError(
                f"{where}: field {field!r} contains {span!r}; expected [start, end] in characters, end exclusive,"
                f" inside a text of {length}"
            )
        spans.append((numbers[0], numbers[1]))
    return spans


def annotated_lines(text: str, spans: Sequence[Sequence[Span]]) -> list[str]:
    """The non-blank lines of a document, each with the spans that begin in it. `spans` are given by field; blanks at
    their ends are ignored."""
    places = [match for match in _LINE.finditer(text) if not match[0].isspace()]
    starts = np.array([match.start() for match in places])
    own: list[list[list[Span]]] = [[[] for _ in spans] for _ in places]
    for field, listed in enumerate(spans):
        for start, end in listed:
            start, end = without_space(text, start, end)
            # An empty span may be between two lines, or before the first.
            number = max(0, int(np.searchsorted(starts, start, side="right")) - 1)
            if places:
                offset = places[number].start()
                own[number][field].append((max(0, start - offset), max(0, end - offset)))
    return [AnnotatedLine(match[0], found) for match, found in zip(places, own, strict=True)]


@dataclass(frozen=True)
class AnnotatedSegment:
    """A segment and the spans that begin in it, as in `AnnotatedLine`.

    Attributes:
        number: index among the segments of its line.
        text: the segment.
        spans: for each field, in characters of the segment.
    """

    number: int
    text: str
    spans: tuple[tuple[Span, ...], ...]


def annotated_segments(line: AnnotatedLine, segments: Sequence[str]) -> Iterator[AnnotatedSegment]:
    """The segments of a line in which spans begin; `segments` are its parts in order, separated only by blanks."""
    starts, at = [], 0
    for segment in segments:
        at = line.index(segment, at)
        starts.append(at)
        at += len(segment)
    own: dict[int, list[list[Span]]] = {}
    for field, listed in enumerate(line.spans):
        for start, end in listed:
            number = max(0, int(np.searchsorted(starts, start, side="right")) - 1)
            found = own.setdefault(number, [[] for _ in line.spans])
            found[field].append((max(0, start - starts[number]), max(0, end - starts[number])))
    for number, found in sorted(own.items()):
        yield AnnotatedSegment(number, segments[number], tuple(map(tuple, found)))


def marked(segment: AnnotatedSegment, offset_T2: Int64Array) -> tuple[NDArray[np.uint8], Int64Array]:
    """Marks of a segment's tokens, two bits per field, and the number of its spans by field and outcome.

    A span covers all tokens that overlap it. Spans of one field do not overlap: longer ones take precedence, then those
    further left. `offset_T2`: the character range of each token in the segment.
    """
    marks_T = np.zeros(len(offset_T2), dtype=np.uint8)
    outcomes_FC = np.zeros((len(segment.spans), len(OUTCOMES)), dtype=np.int64)
    for field, spans in enumerate(segment.spans):
        ranges = []
        for start, end in spans:
            overlapping = np.flatnonzero((offset_T2[:, 0] < end) & (offset_T2[:, 1] > start))
            if start == end or (end <= len(segment.text) and not overlapping.size):
                outcomes_FC[field, _WITHOUT_TOKEN] += 1
            elif end > len(segment.text):
                outcomes_FC[field, _ACROSS] += 1
            else:
                ranges.append((int(overlapping[0]), int(overlapping[-1]) + 1))
        for first, last in sorted(ranges, key=lambda each: (each[0] - each[1], each[0])):
            if (marks_T[first:last] >> 2 * field & INSIDE).any():
                outcomes_FC[field, _OVERLAPPING] += 1
                continue
            marks_T[first:last] |= INSIDE << 2 * field
            marks_T[first] |= BEGINS << 2 * field
            outcomes_FC[field, _KEPT] += 1
    return marks_T, outcomes_FC
