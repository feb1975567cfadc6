"""Known words and their tokens, in numpy.

Not from a paper. A word of up to 15 bytes is two machine words, so numpy looks up tens of thousands at once in a table
with one slot per hash. The rest (new or long words, or those whose slot is taken) are looked up in a dict, at three
times the cost. Sibling compiled_words.py has the same in C++; plain_encoder.py cuts text into words.

Shapes: K texts, W words of a call, T tokens, U distinct words known so far.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bertkit.arrays import Int64Array, Uint64Array

TokensOf = Callable[[list[bytes]], tuple[Int64Array, Int64Array]]
"""From new words to their concatenated ids, and the number of ids of each."""

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


class NumpyWords(KnownWords):
    """The table in numpy.

    Args:
        separator: the byte between two words.
    """

    def __init__(self, separator: bytes) -> None:
        self._separator = separator
        self._forget()

    def _forget(self) -> None:
        self._index = WordIndex(self._separator)
        self._tokens: Int64Array = np.zeros(1 << 12, np.int64)
        self._start_U: Int64Array = np.zeros(1 << 12, np.int64)
        self._used = 0

    def __len__(self) -> int:
        return len(self._index)

    def encode(self, content: bytes, tokens_of: TokensOf) -> tuple[Int64Array, Int64Array]:
        if len(self._index) > MAX_WORDS or self._used > MAX_TOKENS:
            self._forget()
        index_W = self._index.numbers(content)
        new = self._index.take_new()
        if new:
            try:
                self._learn(*tokens_of(new))
            except BaseException:  # these words already have numbers, but no tokens
                self._forget()
                raise
        start_W = self._start_U[index_W]
        length_W = self._start_U[index_W + 1] - start_W
        end_W = np.cumsum(length_W)
        # Token t of a word is in the table at the word's start + (t - the word's first t): one shift for each word.
        source_T = np.arange(int(end_W[-1])) + np.repeat(start_W - (end_W - length_W), length_W)
        text_end_K = end_W[np.append(np.flatnonzero(index_W == 0), len(index_W) - 1)]
        return self._tokens[source_T], np.diff(text_end_K, prepend=0)

    def _learn(self, ids: Int64Array, lengths: Int64Array) -> None:
        """Append the last words of the index to the table: word u has the tokens start_U[u] to start_U[u + 1]."""
        last = len(self._index)
        self._tokens = with_room(self._tokens, self._used + len(ids))
        self._tokens[self._used : self._used + len(ids)] = ids
        self._start_U = with_room(self._start_U, last + 1)
        self._start_U[last + 1 - len(lengths) : last + 1] = self._used + np.cumsum(lengths)
        self._used += len(ids)


_Number = TypeVar("_Number", bound=np.generic)

# The separator between two texts; number 0.
BORDER = b"\n"
CHUNK_WORDS = 1 << 16
PLACE_BITS = 19
# The key of a word of at most 15 bytes is the word with the separator after it, padded with zeros. The key of a longer
# word is its first 16 bytes, which contain no separator. So only long words can share a key.
KEY_BYTES = 16
_KEPT_1 = np.array([(1 << 8 * min(length + 1, 8)) - 1 for length in range(KEY_BYTES)], np.uint64)
_KEPT_2 = np.array([(1 << 8 * max(length - 7, 0)) - 1 for length in range(KEY_BYTES)], np.uint64)
# Fibonacci hashing (Knuth, The Art of Computer Programming 3, section 6.4): 2^64 over the golden ratio, and another odd
# number for the second half.
_FACTOR_1, _FACTOR_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


class WordIndex:
    """Numbers words in order of first occurrence; number 0 is the border. `len`: number of words.

    Words are in UTF-8, which is split faster than text.

    Args:
        separator: the byte between two words.
    """

    def __init__(self, separator: bytes) -> None:
        self._separator = separator
        self._numbers = _Numbers()
        # A free slot has the number of the border, whose key is known, so no other word is found in it by mistake.
        self._number_P = np.zeros(1 << PLACE_BITS, np.int32)
        # Keys are stored by number, not by slot: frequent words have small numbers, so their keys are close together.
        border = int.from_bytes(BORDER + separator, "little")
        self._key_1_U: Uint64Array = np.array([border], np.uint64)
        self._key_2_U: Uint64Array = np.zeros(1, np.uint64)

    def __len__(self) -> int:
        return len(self._numbers)

    def take_new(self) -> list[bytes]:
        """The words numbered since the last call."""
        taken, self._numbers.new = self._numbers.new, []
        return taken

    def numbers(self, content: bytes) -> Int64Array:
        """The number of each word of `content.split(separator)`: number_W."""
        padded = content + self._separator + bytes(KEY_BYTES)
        end_W = np.flatnonzero(np.frombuffer(padded, np.uint8, len(content) + 1) == self._separator[0])
        start_W = np.empty_like(end_W)
        start_W[0], start_W[1:] = 0, end_W[:-1] + 1
        # Eight bytes starting at each byte; little-endian on every machine.
        eight: Uint64Array = np.ndarray(len(padded) - 7, np.dtype("<u8"), padded, strides=(1,))
        number_W = np.empty_like(end_W)
        for first in range(0, len(end_W), CHUNK_WORDS):
            chunk = slice(first, first + CHUNK_WORDS)
            number_W[chunk] = self._chunk(content, eight, start_W[chunk], end_W[chunk])
        return number_W

    def _chunk(self, content: bytes, eight: Uint64Array, start_C: Int64Array, end_C: Int64Array) -> NDArray[np.int32]:
        length_C = end_C - start_C
        key_1_C = eight[start_C] & _KEPT_1.take(length_C, mode="clip")
        key_2_C = eight[start_C + 8] & _KEPT_2.take(length_C, mode="clip")
        place_C = ((key_1_C * _FACTOR_1 + key_2_C * _FACTOR_2) >> np.uint64(64 - PLACE_BITS)).astype(np.int64)
        number_C = self._number_P[place_C]
        missing_M = np.flatnonzero((self._key_1_U[number_C] != key_1_C) | (self._key_2_U[number_C] != key_2_C))
        if len(missing_M):
            bounds = zip(start_C[missing_M].tolist(), end_C[missing_M].tolist(), strict=True)
            words = [content[start:end] for start, end in bounds]
            number_M = np.fromiter(map(self._numbers.__getitem__, words), np.int32, len(words))
            number_C[missing_M] = number_M
            short_M = length_C[missing_M] < KEY_BYTES
            where_M = missing_M[short_M]
            self._place(number_M[short_M], place_C[where_M], key_1_C[where_M], key_2_C[where_M])
        return number_C

    def _place(
        self, number_M: NDArray[np.int32], place_M: Int64Array, key_1_M: Uint64Array, key_2_M: Uint64Array
    ) -> None:
        """Put short words into free slots; the first word keeps a slot, because frequent words come early."""
        self._key_1_U = with_room(self._key_1_U, len(self))
        self._key_2_U = with_room(self._key_2_U, len(self))
        self._key_1_U[number_M], self._key_2_U[number_M] = key_1_M, key_2_M
        free_M = self._number_P[place_M] == 0
        places, first = np.unique(place_M[free_M], return_index=True)
        self._number_P[places] = number_M[free_M][first]


class _Numbers(dict[bytes, int]):
    """Gives an unknown word the next number."""

    def __init__(self) -> None:
        super().__init__({BORDER: 0})
        self.new: list[bytes] = []

    def __missing__(self, word: bytes) -> int:
        number = self[word] = len(self)
        self.new.append(word)
        return number


def with_room(array: NDArray[_Number], size: int) -> NDArray[_Number]:
    """The array itself, or a copy of at least twice the length, padded with zeros, if `size` entries do not fit."""
    if size <= len(array):
        return array
    grown = np.zeros(max(size, 2 * len(array)), array.dtype)
    grown[: len(array)] = array
    return grown
