"""Known words and their tokens, in a dict.

Not from a paper. Words are in UTF-8, which is split faster than text. Sibling compiled_words.py has the same in C++,
three times as fast; plain_encoder.py cuts text into words.

Shapes: K texts, W words of a call, T tokens, U distinct words known so far.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable

import numpy as np

from bertkit.arrays import Int64Array

TokensOf = Callable[[list[bytes]], tuple[Int64Array, Int64Array]]
"""From new words to their concatenated ids, and the number of ids of each."""

BORDER = b"\n"
"""The word between two texts; number 0."""
MAX_WORDS = 1 << 18
MAX_TOKENS = 1 << 22


class KnownWords(ABC):
    """Words with their ids, each tokenised once. `len`: number of known words."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encode(self, content: bytes, tokens_of: TokensOf) -> tuple[Int64Array, Int64Array]:
        """The concatenated ids of all texts, ids_T, and the number of ids of each, length_K.

        Args:
            content: words in UTF-8 with the table's separator between them; between two texts is the word BORDER.
            tokens_of: called with words that are new.
        """


class DictWords(KnownWords):
    """The table as a dict.

    Args:
        separator: the byte between two words.
    """

    def __init__(self, separator: bytes) -> None:
        self._separator = separator
        self._forget()

    def _forget(self) -> None:
        self._numbers = _Numbers()
        self._tokens = array("q")
        self._starts = array("q", (0, 0))  # word u has the tokens from start u to start u + 1; the border has none

    def __len__(self) -> int:
        return len(self._numbers)

    def encode(self, content: bytes, tokens_of: TokensOf) -> tuple[Int64Array, Int64Array]:
        if len(self) > MAX_WORDS or len(self._tokens) > MAX_TOKENS:
            self._forget()
        words = content.split(self._separator)
        number_W = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
        new, self._numbers.new = self._numbers.new, []
        if new:
            try:
                ids, lengths = tokens_of(new)
            except BaseException:  # these words already have numbers, but no tokens
                self._forget()
                raise
            self._starts.frombytes((len(self._tokens) + np.cumsum(lengths)).tobytes())
            self._tokens.frombytes(ids.tobytes())
        start_U, tokens = (np.frombuffer(numbers, np.int64) for numbers in (self._starts, self._tokens))
        start_W = start_U[number_W]
        length_W = start_U[number_W + 1] - start_W
        end_W = np.cumsum(length_W)
        # Token t of a word is in the table at the word's start + (t - the word's first t): one shift for each word.
        source_T = np.arange(int(end_W[-1])) + np.repeat(start_W - (end_W - length_W), length_W)
        text_end_K = end_W[np.append(np.flatnonzero(number_W == 0), len(words) - 1)]
        return tokens[source_T], np.diff(text_end_K, prepend=0)


class _Numbers(dict[bytes, int]):
    """Gives an unknown word the next number, and lists it in `new`."""

    def __init__(self) -> None:
        super().__init__({BORDER: 0})
        self.new: list[bytes] = []

    def __missing__(self, word: bytes) -> int:
        number = self[word] = len(self)
        self.new.append(word)
        return number
