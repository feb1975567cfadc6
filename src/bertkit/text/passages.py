"""A text of any length as paragraphs and sentences, each by its place.

Own design. Blank lines separate paragraphs. Lines that were broken to fit a page are joined; others, such as headlines,
list items and paragraphs of one line each, stand for themselves. Sibling sentences.py splits one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from bertkit.text.sentences import sentence_places
from bertkit.text.word_split import Place

_LINE = re.compile(r"[^\r\n]+")
_AS_SPACES = {ord(mark): " " for mark in "\r\n\t"}
_WIDEST_PAGE = 120
"""Characters of the longest line that was broken to fit a page."""
_NEARLY_FULL = 0.7
"""Share of the longest line that every broken line but a paragraph's last reaches."""


def paragraph_places(text: str) -> Iterator[Place]:
    """The paragraphs that are not blank, in order."""
    for block in blocks_of_paragraphs(text):
        yield from block


def blocks_of_paragraphs(text: str) -> Iterator[list[Place]]:
    """The paragraphs between blank lines, those that are not blank.

    The lines between two blank ones are one paragraph if all but the last are nearly as long as the longest, and none
    is longer than a page is wide; else each is one.
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
    """The sentences of a paragraph, in characters of the text."""
    start, end = paragraph
    line = text[start:end].translate(_AS_SPACES)
    return [(start + first, start + last) for first, last in sentence_places(line)]
