"""Encoding a corpus fast: each distinct word goes through the tokenizer once.

No paper. No token of a BERT, GPT-2 or SentencePiece-like vocabulary crosses a space, so the ids of a text are the ids
of its words end to end; `tokenizers` itself encodes every occurrence again, at a tenth of the speed. A word of up to 15
bytes is two machine words, so numpy looks up tens of thousands of them at once in a table with one place for each hash;
the rest (new or long words, or those whose place is taken) are looked up in a dict, at three times the cost.

Shapes: K texts, W words of a call, T tokens, U distinct words known so far.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
# How a text is split into words: at any space and around punctuation, at single spaces only, or before single spaces,
# which the word then keeps.
Cutting = Literal["bert", "single-space", "before-space"]

MAX_WORDS = 1 << 18
MAX_TOKENS = 1 << 22
# BERT separates words from punctuation itself; done beforehand, half as many distinct words remain.
# A mark that usually has a space on one side is separated on the other side only.
_SEPARATED = [
    *((mark, b" " + mark) for mark in (b",", b".", b")", b";", b":")),
    (b"(", b"( "),
    *((mark, b" " + mark + b" ") for mark in (b'"', b"'", b"-")),
]
# Of printable ASCII, BERT takes all that is not a letter, a digit or the space for a mark of its own.
_BERT_PARTS = re.compile(r"[0-9A-Za-z]+|[^0-9A-Za-z ]")
# The sign by which SentencePiece's vocabularies write a space stands for one in a text, too.
_UNEVEN_SPACE = re.compile(r"^\s|\s$|[^\S ]|  |\0|\u2581")
_LOCAL_NORMALIZERS = {"BertNormalizer", "Lowercase", "StripAccents", "Strip", "NFC", "NFD", "NFKC", "NFKD", "Replace"}


class PlainEncoder:
    """Encodes text as text: special tokens written out in it are not recognised, and none are added.

    Ids are those of the tokenizer itself: where its rules do not stop at spaces, it encodes every text whole. Memory is
    bounded: the table of known words is emptied when it is full.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        content = backend.to_str()
        settings = json.loads(content)
        self._backend = tokenizers.Tokenizer.from_str(content)
        self._backend.encode_special_tokens = True
        self._cutting = word_cutting(settings)
        self._is_bert = _is_bert(settings)
        self._lowercases = self._is_bert and bool(settings["normalizer"]["lowercase"])
        self._index = self._new_index()
        self._tokens: Int64s = np.zeros(1 << 12, np.int64)
        self._start_U: Int64s = np.zeros(1 << 12, np.int64)
        self._used = 0

    def encode(self, texts: Sequence[str]) -> tuple[Int64s, Int64s]:
        """Ids ids_T of all texts end to end, and the number of ids of each, length_K."""
        if not texts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        if self._cutting is None:
            return _flattened(self._ids(texts))
        if self._cutting == "bert":
            return self._encode_words(self._bert_words(texts))
        uneven = [k for k, text in enumerate(texts) if _UNEVEN_SPACE.search(text)]
        if uneven:
            return self._encode_with_uneven(texts, uneven)
        return self._encode_words(self._spaced_words(texts))

    def _new_index(self) -> WordIndex:
        return WordIndex(b"\0" if self._cutting == "before-space" else b" ")

    def _bert_words(self, texts: Sequence[str]) -> bytes:
        """Words of all texts with borders between; a line end inside a text is a space to BERT."""
        joined = " \n ".join(texts)
        if joined.count("\n") >= len(texts):
            joined = " \n ".join([text.replace("\n", " ") for text in texts])
        content = joined.encode()
        if self._lowercases:
            # Of bytes, ASCII letters alone are lowercased: the rest is left to the tokenizer's own tables.
            content = content.lower()
        for mark, separated in _SEPARATED:
            content = content.replace(mark, separated)
        return content

    def _spaced_words(self, texts: Sequence[str]) -> bytes:
        if self._cutting == "single-space":
            return " \n ".join(texts).encode()
        return "\0\n\0".join(texts).encode().replace(b" ", b"\0 ")

    def _encode_with_uneven(self, texts: Sequence[str], uneven: list[int]) -> tuple[Int64s, Int64s]:
        """The texts whose spaces do not simply part words are encoded whole."""
        ids_K = dict(zip(uneven, self._ids([texts[k] for k in uneven]), strict=True))
        even = [k for k in range(len(texts)) if k not in ids_K]
        if even:
            flat_T, length_E = self._encode_words(self._spaced_words([texts[k] for k in even]))
            parts = np.split(flat_T, np.cumsum(length_E)[:-1])
            ids_K |= dict(zip(even, (part.tolist() for part in parts), strict=True))
        return _flattened([ids_K[k] for k in range(len(texts))])

    def _encode_words(self, content: bytes) -> tuple[Int64s, Int64s]:
        if len(self._index) > MAX_WORDS or self._used > MAX_TOKENS:
            self._index, self._used = self._new_index(), 0
        index_W = self._index.numbers(content)
        self._learn(self._index.take_new())
        start_W = self._start_U[index_W]
        length_W = self._start_U[index_W + 1] - start_W
        end_W = np.cumsum(length_W)
        # Token t of a word is in the table at the word's start + (t - the word's first t): one shift for each word.
        source_T = np.arange(int(end_W[-1])) + np.repeat(start_W - (end_W - length_W), length_W)
        text_end_K = end_W[np.append(np.flatnonzero(index_W == 0), len(index_W) - 1)]
        return self._tokens[source_T], np.diff(text_end_K, prepend=0)

    def _learn(self, new: list[bytes]) -> None:
        """Append the last words of the index to the table: word u has the tokens start_U[u] to start_U[u + 1]."""
        if not new:
            return
        words = [word.decode() for word in new]
        rows: dict[str, list[int]] = {"": []}
        if self._is_bert:
            rows |= self._bert_rows(words)
        others = [word for word in words if word not in rows]
        rows |= zip(others, self._ids(others), strict=True)
        ids, lengths = _flattened([rows[word] for word in words])
        last = len(self._index)
        self._tokens = with_room(self._tokens, self._used + len(ids))
        self._tokens[self._used : self._used + len(ids)] = ids
        self._start_U = with_room(self._start_U, last + 1)
        self._start_U[last + 1 - len(words) : last + 1] = self._used + np.cumsum(lengths)
        self._used += len(ids)

    def _bert_rows(self, words: list[str]) -> dict[str, list[int]]:
        """Ids of the words that BERT's normaliser makes printable ASCII, where its cutting is a pattern of a line.

        By the model directly: the tokenizer takes three times as long, for offsets and the like.
        """
        normalize, tokenize = self._backend.normalizer.normalize_str, self._backend.model.tokenize
        rows = {}
        for word in words:
            normal = word if word.isascii() else normalize(word)
            if normal.isalnum() and normal.isascii():
                rows[word] = [token.id for token in tokenize(normal)]
            elif normal.isascii() and normal.isprintable():
                rows[word] = [token.id for part in _BERT_PARTS.findall(normal) for token in tokenize(part)]
        return rows

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def _is_bert(settings: dict[str, Any]) -> bool:
    """Are words normalised and cut as BERT does it, and in no other way besides?"""
    steps = [(settings[part] or {}).get("type") for part in ("normalizer", "pre_tokenizer")]
    return word_cutting(settings) == "bert" and steps == ["BertNormalizer", "BertPreTokenizer"]


def word_cutting(settings: dict[str, Any]) -> Cutting | None:
    """Where texts may be cut so that the ids of the parts are the ids of the whole; None: nowhere.

    Args:
        settings: the content of tokenizer.json.
    """
    if any(not token["special"] for token in settings["added_tokens"]) or settings["model"].get("dropout"):
        return None
    if not all(_is_local(step) for step in _steps(settings["normalizer"], "normalizers")):
        return None
    steps = _steps(settings["pre_tokenizer"], "pretokenizers")
    first = steps[0] if steps else {"type": None}
    if first["type"] == "BertPreTokenizer":
        return "bert"
    if first["type"] == "Metaspace" and first.get("split", True) and first.get("prepend_scheme") == "always":
        return "single-space"
    if first["type"] == "ByteLevel" and first.get("use_regex", True):
        return "single-space" if first["add_prefix_space"] else "before-space"
    return None


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [step for child in part[key] for step in _steps(child, key)] if part["type"] == "Sequence" else [part]


def _is_local(step: dict[str, Any]) -> bool:
    """Does this normaliser treat the words of an evenly spaced text each for itself?"""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String") or step["pattern"]["Regex"]
        return " " not in pattern or pattern == " {2,}"
    return step["type"] in _LOCAL_NORMALIZERS


def _flattened(rows: list[list[int]]) -> tuple[Int64s, Int64s]:
    length_K = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int64, int(length_K.sum())), length_K


Uint64s = NDArray[np.uint64]
_Number = TypeVar("_Number", bound=np.generic)

# The separator between two texts; number 0.
BORDER = b"\n"
CHUNK_WORDS = 1 << 16
PLACE_BITS = 19
# The key of a word of at most 15 bytes is the word with the separator after it, padded with zeros; of a longer word
# the first 16 bytes, among which there is no separator. So no two words have the same key, but for long ones.
KEY_BYTES = 16
_KEPT_1 = np.array([(1 << 8 * min(length + 1, 8)) - 1 for length in range(KEY_BYTES)], np.uint64)
_KEPT_2 = np.array([(1 << 8 * max(length - 7, 0)) - 1 for length in range(KEY_BYTES)], np.uint64)
# Fibonacci hashing (Knuth, The Art of Computer Programming 3, section 6.4): 2^64 over the golden ratio, and another odd
# number for the second half.
_FACTOR_1, _FACTOR_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


class WordIndex:
    """Numbers words in the order in which they first come; number 0 is the border. `len`: words numbered.

    Words are in UTF-8, which is cut up faster than text.

    Args:
        separator: the byte that is between two words.
    """

    def __init__(self, separator: bytes) -> None:
        self._separator = separator
        self._numbers = _Numbers()
        # A free place has the number of the border, whose key is known: no other word is taken for found there.
        self._number_P = np.zeros(1 << PLACE_BITS, np.int32)
        # Keys by number, not by place: frequent words have small numbers, so theirs are close together.
        border = int.from_bytes(BORDER + separator, "little")
        self._key_1_U: Uint64s = np.array([border], np.uint64)
        self._key_2_U: Uint64s = np.zeros(1, np.uint64)

    def __len__(self) -> int:
        return len(self._numbers)

    def take_new(self) -> list[bytes]:
        """Words numbered since the last call."""
        taken, self._numbers.new = self._numbers.new, []
        return taken

    def numbers(self, content: bytes) -> Int64s:
        """The number of each word, of `content.split(separator)`: number_W."""
        padded = content + self._separator + bytes(KEY_BYTES)
        end_W = np.flatnonzero(np.frombuffer(padded, np.uint8, len(content) + 1) == self._separator[0])
        start_W = np.empty_like(end_W)
        start_W[0], start_W[1:] = 0, end_W[:-1] + 1
        # Eight bytes from any byte on; little-endian on every machine.
        eight: Uint64s = np.ndarray(len(padded) - 7, np.dtype("<u8"), padded, strides=(1,))
        number_W = np.empty_like(end_W)
        for first in range(0, len(end_W), CHUNK_WORDS):
            chunk = slice(first, first + CHUNK_WORDS)
            number_W[chunk] = self._chunk(content, eight, start_W[chunk], end_W[chunk])
        return number_W

    def _chunk(self, content: bytes, eight: Uint64s, start_C: Int64s, end_C: Int64s) -> NDArray[np.int32]:
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

    def _place(self, number_M: NDArray[np.int32], place_M: Int64s, key_1_M: Uint64s, key_2_M: Uint64s) -> None:
        """Put short words into places that are free; who comes first stays, for frequent words come early."""
        self._key_1_U = with_room(self._key_1_U, len(self))
        self._key_2_U = with_room(self._key_2_U, len(self))
        self._key_1_U[number_M], self._key_2_U[number_M] = key_1_M, key_2_M
        free_M = self._number_P[place_M] == 0
        places, first = np.unique(place_M[free_M], return_index=True)
        self._number_P[places] = number_M[free_M][first]


class _Numbers(dict[bytes, int]):
    """A word not yet known gets the next number."""

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
