"""Known words and their tokens, in C++: the same as word_table.py, three times as fast.

BERT's words of printable ASCII are split into tokens there (Devlin et al. 2019, arXiv:1810.04805; longest match from
left to right as in Wu et al. 2016, arXiv:1609.08144), because `tokenizers` takes three microseconds per word. Other
words still go through `tokenizers`. Building the library takes half a second, once per version (native.py). It is
optional: without it the ids are the same.

Shapes: K texts, W words of a call, T tokens, N words passed to `tokenizers`.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertkit.arrays import Int64Array
from bertkit.native import CompilerError, build_library, library_file
from bertkit.text import word_table
from bertkit.text.word_table import KnownWords, TokensOf

SOURCE = Path(__file__).with_name("words.cpp")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")

MOST_NODES = 1 << 22
"""Maximum number of characters of a vocabulary that is split here; nodes of its tree have numbers of 23 bits."""
_WITHOUT = "words are looked up without a compiled table, at a third of the speed"

log = logging.getLogger(__name__)


def words_library() -> Path | None:
    """The library, if it has been built on this machine and can be loaded."""
    try:
        path = _library_file()
        if not path.exists():
            return None
        _loaded(path)
    except OSError as error:
        log.info("%s: %s", _WITHOUT, error)
        return None
    return path


def build_words_library() -> None:
    """Build the library for later tokenizers, if there is a compiler; without one only speed is lost."""
    try:
        build_library(_library_file(), [SOURCE], FLAGS)
    except (CompilerError, OSError) as error:
        log.info("%s: %s", _WITHOUT, error)


def _library_file() -> Path:
    return library_file([SOURCE], FLAGS, {"machine": platform.machine(), "libc": platform.libc_ver()})


@dataclass(frozen=True)
class Pieces:
    """A WordPiece vocabulary's rules for words of printable ASCII.

    Attributes:
        vocabulary: the id of each token.
        continuing: the prefix of tokens within a word.
        unknown: the id for words that cannot be split into tokens.
        longest: maximum number of characters; a longer word is unknown.
    """

    vocabulary: dict[str, int]
    continuing: str
    unknown: int
    longest: int

    def of_ascii(self) -> Iterator[tuple[bytes, bool, int]]:
        """Each token's text, whether it continues a word, and its id; those that begin with the prefix are both."""
        for token, number in self.vocabulary.items():
            if not token.isascii():
                continue
            yield token.encode(), False, number
            if token.startswith(self.continuing):
                yield token.removeprefix(self.continuing).encode(), True, number


def pieces_of(settings: dict[str, Any]) -> Pieces | None:
    """The rules of a tokenizer.json; None if its model is not WordPiece with a token for unknown words."""
    model = settings["model"]
    unknown = model.get("vocab", {}).get(model.get("unk_token"))
    if model.get("type") != "WordPiece" or unknown is None or not model.get("continuing_subword_prefix"):
        return None
    if 2 * sum(map(len, model["vocab"])) > MOST_NODES:
        return None
    return Pieces(
        model["vocab"], model["continuing_subword_prefix"], unknown, longest=model["max_input_chars_per_word"]
    )


class CompiledWords(KnownWords):
    """The table in C++; its functions check nothing, so all sizes are computed here.

    Args:
        library: `words_library`.
        separator: the byte between two words.
        pieces: rules by which words of printable ASCII are split; None: all words are passed to `tokens_of`.
    """

    def __init__(self, library: Path, separator: bytes, pieces: Pieces | None) -> None:
        self._library = _loaded(library)
        self._separator = separator
        unknown, longest = (0, 0) if pieces is None else (pieces.unknown, pieces.longest)
        self._table = self._library.words_new(separator[0], pieces is not None, unknown, longest)
        weakref.finalize(self, self._library.words_free, self._table)
        for piece, continues, number in () if pieces is None else pieces.of_ascii():
            self._library.words_add_piece(self._table, piece, len(piece), continues, number)

    def __len__(self) -> int:
        return int(self._library.words_count(self._table))

    def encode(self, content: bytes, tokens_of: TokensOf) -> tuple[Int64Array, Int64Array]:
        library, table = self._library, self._table
        if len(self) > word_table.MAX_WORDS or library.words_tokens(table) > word_table.MAX_TOKENS:
            library.words_clear(table)
        most = library.words_in(content, len(content), self._separator[0])
        number_W, asked_N = (np.empty(most, np.int32) for _ in range(2))
        start_N, end_N = (np.empty(most, np.int64) for _ in range(2))
        asked = ctypes.c_int64()
        words = library.words_read(
            table, content, len(content), *_addresses(number_W, asked_N, start_N, end_N), ctypes.byref(asked)
        )
        assert words == most
        if asked.value:
            bounds = zip(start_N[: asked.value].tolist(), end_N[: asked.value].tolist(), strict=True)
            try:
                ids, lengths = tokens_of([content[start:end] for start, end in bounds])
            except BaseException:  # these words already have numbers, but no tokens
                library.words_clear(table)
                raise
            assert len(lengths) == asked.value
            assert int(lengths.sum()) == len(ids)
            library.words_set_tokens(table, asked.value, *_addresses(asked_N, lengths, ids))
        ids_T = np.empty(library.words_total(table, *_addresses(number_W), words), np.int64)
        # A border ends a text, and so does the last word.
        length_K = np.empty(np.count_nonzero(number_W[:-1] == 0) + 1, np.int64)
        library.words_write(table, *_addresses(number_W), words, *_addresses(ids_T, length_K))
        return ids_T, length_K


def _addresses(*arrays: NDArray[Any]) -> list[ctypes.c_void_p]:
    assert all(array.flags.c_contiguous for array in arrays)
    return [ctypes.c_void_p(array.ctypes.data) for array in arrays]


@cache
def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, number, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "words_new": (pointer, [ctypes.c_int, ctypes.c_int, number, size]),
        "words_free": (None, [pointer]),
        "words_add_piece": (None, [pointer, ctypes.c_char_p, size, ctypes.c_int, number]),
        "words_clear": (None, [pointer]),
        "words_count": (size, [pointer]),
        "words_tokens": (size, [pointer]),
        "words_in": (size, [ctypes.c_char_p, size, ctypes.c_int]),
        "words_read": (size, [pointer, ctypes.c_char_p, size, *[pointer] * 5]),
        "words_set_tokens": (None, [pointer, size, *[pointer] * 3]),
        "words_total": (size, [pointer, pointer, size]),
        "words_write": (None, [pointer, pointer, size, pointer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = library[name]
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)
    return library
