"""A text of any length split into paragraphs and sentences, each with its position.

Not from a paper. Blank lines separate paragraphs. Lines that were broken to fit a page are joined; other lines, such as
headlines, list items and one-line paragraphs, stay separate. Sibling sentences.py splits one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from bertkit.text.sentences import sentence_places
from bertkit.text.word_split import Place

_LINE = re.compile(r"[^\r\n]+")
_AS_SPACES = {ord(mark): " " for mark in "\r\n\t"}
_WIDEST_PAGE = 120
"""Maximum length of a line that was broken to fit a page."""
_NEARLY_FULL = 0.7
"""Minimum length of a broken line, except a paragraph's last, as a share of the longest line."""


def paragraph_places(text: str) -> Iterator[Place]:
    """The paragraphs that are not blank, in order."""
    for block in blocks_of_paragraphs(text):
        yield from block


def blocks_of_paragraphs(text: str) -> Iterator[list[Place]]:
    """The non-blank paragraphs between blank lines.

    The lines between two blank ones are one paragraph if all except the last are nearly as long as the longest, and
    none is longer than a page is wide; otherwise each line is a paragraph.
    """
    block: list[Place] = []
    for match in _LINE.finditer(text):
        start, end = match.span()
        if block and (match[0].isspace() or _has_blank_line(text, block[-1][1], start)):
            yield _paragraphs(block)
            block = []
        if not match[0].isspace():
            block.append((start, end))
    if block:
        yield _paragraphs(block)


def _has_blank_line(text: str, end: int, start: int) -> bool:
    between = text[end:start]
    return between.count("\n") > 1 or (between.count("\r") > 1 and "\n" not in between)


def _paragraphs(lines: list[Place]) -> list[Place]:
    """The paragraphs of a block of lines."""
    sizes = [end - start for start, end in lines]
    longest = max(sizes)
    if longest <= _WIDEST_PAGE and all(size >= _NEARLY_FULL * longest for size in sizes[:-1]):
        return [(lines[0][0], lines[-1][1])]
    return lines


def sentence_places_in(text: str, paragraph: Place) -> list[Place]:
    """The sentences of a paragraph, as character ranges of the text."""
    start, end = paragraph
    line = text[start:end].translate(_AS_SPACES)
    return [(start + first, start + last) for first, last in sentence_places(line)]
