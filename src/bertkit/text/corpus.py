"""A corpus: one stream of documents, with positions from which reading can continue, and a sample of its text.

Not from a paper; sources.py opens one, readers.py reads each kind of file, sentences.py splits documents into segments.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bertkit.files import json_sha256
from bertkit.progress import Progress, silent_progress
from bertkit.text.readers import Part, Reader
from bertkit.text.source_options import SourceOptions

BLOCK_CHARACTERS = 1 << 19


@dataclass(frozen=True)
class Position:
    """Where reading continues: after `parts` parts of reader number `reader`."""

    reader: int = 0
    parts: int = 0


@dataclass(frozen=True)
class Block:
    """A part of the corpus of bounded size: whole documents, or part of a large one.

    Attributes:
        parts: documents as (begins, lines); a part that does not begin a document continues the previous one.
        end: where the next block begins.
    """

    parts: list[Part]
    end: Position

    @property
    def characters(self) -> int:
        return sum(sum(map(len, lines)) for _, lines in self.parts)


@dataclass(frozen=True)
class Corpus:
    """Documents of all sources in order.

    Attributes:
        readers: of the sources, in order.
        options: reading options.
        contents: for each reader, the hash of its content.
    """

    readers: Sequence[Reader]
    options: SourceOptions
    contents: Sequence[str]
    sources: Sequence[str] = ()

    @property
    def fingerprint(self) -> str:
        """sha256 over the content of every source and the options; file names are not included."""
        read = [[reader.kind, content] for reader, content in zip(self.readers, self.contents, strict=True)]
        return json_sha256([read, self.options.decides])

    def describe(self) -> list[dict[str, Any]]:
        """The sources, for manifests: name, kind and content hash of each reader."""
        return [
            {"name": reader.name, "kind": reader.kind, "content": content}
            for reader, content in zip(self.readers, self.contents, strict=True)
        ]

    @property
    def hashes(self) -> dict[str, str]:
        """The content hash of each reader, by its name."""
        return {reader.name: content for reader, content in zip(self.readers, self.contents, strict=True)}

    def blocks(self, start: Position | None = None) -> Iterator[Block]:
        """The corpus in blocks of about half a million characters, from a position where an earlier block ended.

        The blocks are the same as when reading from the start.
        """
        at = start or Position()
        parts: list[Part] = []
        size = 0
        for index in range(at.reader, len(self.readers)):
            done = at.parts if index == at.reader else 0
            for number, part in enumerate(self.readers[index].parts(), 1):
                if number <= done:
                    continue
                parts.append(part)
                size += sum(map(len, part[1]))
                if size >= BLOCK_CHARACTERS:
                    yield Block(parts, Position(index, number))
                    parts, size = [], 0
        if parts:
            yield Block(parts, Position(len(self.readers), 0))

    def sample_text(self, megabytes: float, progress: Progress = silent_progress) -> Iterator[str]:
        """Lines of documents sampled evenly from the whole corpus, in order, about this many megabytes."""
        sample = TextSample(int(megabytes * 1e6))
        with progress("reading a sample", unit="characters") as meter:
            for block in self.blocks():
                for _, lines in block.parts:
                    sample.add(lines)
                meter.update(sample.read)
        yield from sample.lines()

    def documents(self) -> Iterator[list[str]]:
        """The lines of one document after another, for corpora whose documents fit in memory."""
        document: list[str] = []
        for block in self.blocks():
            for begins, lines in block.parts:
                if begins and document:
                    yield document
                    document = []
                document += lines
        if document:
            yield document


class TextSample:
    """An even, deterministic sample of documents in one pass and bounded memory.

    Each document gets a number from a fixed generator; those with the smallest numbers are kept, as many as fit.

    Args:
        max_characters: characters to keep; a single document may be longer.

    Attributes:
        size: characters kept.
        read: characters of all documents.
    """

    def __init__(self, max_characters: int) -> None:
        self.size = self.read = 0
        self._max_characters = max_characters
        self._numbers = random.Random(0)
        self._kept: list[tuple[float, int, list[str]]] = []
        self._index = 0

    def add(self, lines: list[str]) -> None:
        """Add one document, or a part of one."""
        heapq.heappush(self._kept, (-self._numbers.random(), self._index, lines))
        self._index += 1
        characters = sum(map(len, lines))
        self.read += characters
        self.size += characters
        self.shrink(self._max_characters)

    def shrink(self, max_characters: int) -> None:
        """Keep at most this many characters from now on."""
        self._max_characters = min(self._max_characters, max_characters)
        while self.size > self._max_characters and len(self._kept) > 1:
            self.size -= sum(map(len, heapq.heappop(self._kept)[2]))

    def lines(self) -> Iterator[str]:
        """The lines kept, in corpus order."""
        for _, _, lines in sorted(self._kept, key=lambda entry: entry[1]):
            yield from lines
