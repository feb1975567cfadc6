"""An even sample of documents in one pass and bounded memory, for learning a vocabulary.

Each document gets a number from a fixed generator, and those with the smallest numbers are kept as far as they fit: the
same sample every time. With several languages (see languages.py) there is one of these for each.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator


class TextSample:
    """What is kept of the documents read so far.

    Args:
        room: characters to keep at most; a single document may be longer.

    Attributes:
        size: characters kept.
        read: characters seen.
    """

    def __init__(self, room: int) -> None:
        self.size = self.read = 0
        self._room = room
        self._numbers = random.Random(0)
        self._kept: list[tuple[float, int, list[str]]] = []
        self._index = 0

    def add(self, lines: list[str]) -> None:
        """One document, or a part of one."""
        heapq.heappush(self._kept, (-self._numbers.random(), self._index, lines))
        self._index += 1
        characters = sum(map(len, lines))
        self.read += characters
        self.size += characters
        self.shrink(self._room)

    def shrink(self, room: int) -> None:
        """Keep no more than this."""
        self._room = min(self._room, room)
        while self.size > self._room and len(self._kept) > 1:
            self.size -= sum(map(len, heapq.heappop(self._kept)[2]))

    def lines(self) -> Iterator[str]:
        """The lines kept, in the order in which they came."""
        for _, _, lines in sorted(self._kept, key=lambda entry: entry[1]):
            yield from lines
