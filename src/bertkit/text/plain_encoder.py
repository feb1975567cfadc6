"""Fast encoding of a corpus: each distinct word goes through the tokenizer once.

Not from a paper. No token of a BERT, GPT-2 or SentencePiece-like vocabulary crosses a space, so the ids of a text are
the concatenated ids of its words. `tokenizers` itself encodes every occurrence again, at a tenth of the speed. Known
words are stored with their ids in a table: in C++ if a compiler has built it (compiled_words.py), else in a dict
(word_table.py).

Shapes: K texts, T tokens.
"""

from __future__ import annotations

import json
import re
import threading
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any, Literal

import numpy as np
import tokenizers

from bertkit.arrays import Int64Array
from bertkit.text.compiled_words import CompiledWords, pieces_of, words_library
from bertkit.text.word_table import DictWords, KnownWords

# How a text is split into words: at any space and around punctuation, at single spaces only, or before single spaces,
# which then stay with the word.
Cutting = Literal["bert", "single-space", "before-space"]

# BERT separates words from punctuation itself; doing it beforehand halves the number of distinct words.
# A mark that usually has a space on one side is separated only on the other side.
_SEPARATED = [
    *((mark, b" " + mark) for mark in (b",", b".", b")", b";", b":")),
    (b"(", b"( "),
    *((mark, b" " + mark + b" ") for mark in (b'"', b"'", b"-")),
]
# In printable ASCII, BERT treats everything except letters, digits and the space as a separate token.
_BERT_PARTS = re.compile(r"[0-9A-Za-z]+|[^0-9A-Za-z ]")
# The character by which SentencePiece vocabularies write a space stands for one in a text, too.
_UNEVEN_SPACE = re.compile(r"^\s|\s$|[^\S ]|  |\0|\u2581")
_FIRST_SPACE = {"type": "Metaspace", "replacement": " ", "prepend_scheme": "first", "split": False}
"""The step before ByteLevel in vocabulary.py: a space before a text, which a text that begins with one does not get."""

WORDS_WITH_MARKS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}\p{M}\u200c\u200d]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}\u200c\u200d]+|\s+(?!\S)|\s+"
)
"""GPT-2's pattern, except that marks and joiners are part of words: its own splits every Hindi or Thai word at vowel
signs."""

_LOCAL_NORMALIZERS = {"Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD"}


class PlainEncoder:
    """Encodes text literally: special tokens written out in it are not recognised, and none are added.

    Ids are those of the tokenizer itself: if its rules do not stop at spaces, it encodes every text whole. Memory is
    bounded: the table of known words is emptied when it is full. Threads take turns.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        content = backend.to_str()
        settings = json.loads(content)
        self._backend = tokenizers.Tokenizer.from_str(content)
        self._backend.encode_special_tokens = True
        self._cutting = word_cutting(settings)
        # Tokens that the tokenizer finds in a text as it is written, such as marks around entities.
        found = [re.escape(token["content"]) for token in settings["added_tokens"] if not token["special"]]
        self._tokens_in_text = re.compile("|".join(found)) if found else None
        self._is_bert = _is_bert(settings)
        normalizers = {step["type"] for step in _steps(settings["normalizer"], "normalizers")}
        self._separates_accents = not normalizers.isdisjoint({"NFKC", "NFKD", "StripAccents"})
        self._lowercases = self._is_bert and bool(settings["normalizer"]["lowercase"])
        self._words = self._table(settings)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[PlainEncoder], tuple[tokenizers.Tokenizer]]:
        return PlainEncoder, (self._backend,)

    def encode(self, texts: Sequence[str]) -> tuple[Int64Array, Int64Array]:
        """The concatenated ids of all texts, ids_T, and the number of ids of each, length_K."""
        if not texts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        if self._cutting is None:
            return _flattened(self._ids(texts))
        if self._cutting == "bert" and self._tokens_in_text is None:
            return self._encode_words(self._words_of(texts))
        uneven = [k for k, text in enumerate(texts) if self._is_uneven(text)]
        if uneven:
            return self._encode_with_uneven(texts, uneven)
        return self._encode_words(self._words_of(texts))

    def _is_uneven(self, text: str) -> bool:
        """Whether a text has a token that is found in texts, or its words are not separated by single spaces, as
        written or after it is normalised. BERT separates words by any space."""
        if self._tokens_in_text is not None and self._tokens_in_text.search(text) is not None:
            return True
        if self._cutting == "bert":
            return False
        if _UNEVEN_SPACE.search(text) is not None:
            return True
        if text.isascii() or not self._separates_accents:
            return False
        sign, accent = _signs_and_accents()
        return sign.search(text) is not None or accent.search(f" {text}") is not None

    def _table(self, settings: dict[str, Any]) -> KnownWords:
        separator = b"\0" if self._cutting == "before-space" else b" "
        library = words_library() if self._cutting is not None else None
        if library is None:
            return DictWords(separator)
        return CompiledWords(library, separator, pieces_of(settings) if self._is_bert else None)

    def _bert_words(self, texts: Sequence[str]) -> bytes:
        """Words of all texts with borders between texts; BERT treats a line end inside a text as a space."""
        joined = " \n ".join(texts)
        if joined.count("\n") >= len(texts):
            joined = " \n ".join([text.replace("\n", " ") for text in texts])
        content = joined.encode()
        if self._lowercases:
            # In bytes, only ASCII letters are lowercased; the rest is left to the tokenizer's own tables.
            content = content.lower()
        for mark, separated in _SEPARATED:
            content = content.replace(mark, separated)
        return content

    def _words_of(self, texts: Sequence[str]) -> bytes:
        if self._cutting == "bert":
            return self._bert_words(texts)
        if self._cutting == "single-space":
            return " \n ".join(texts).encode()
        return "\0\n\0".join(texts).encode().replace(b" ", b"\0 ")

    def _encode_with_uneven(self, texts: Sequence[str], uneven: list[int]) -> tuple[Int64Array, Int64Array]:
        """As `encode`; the texts at `uneven`, which cannot be cut into words, are encoded whole."""
        ids_K = dict(zip(uneven, self._ids([texts[k] for k in uneven]), strict=True))
        even = [k for k in range(len(texts)) if k not in ids_K]
        if even:
            flat_T, length_E = self._encode_words(self._words_of([texts[k] for k in even]))
            parts = np.split(flat_T, np.cumsum(length_E)[:-1])
            ids_K |= dict(zip(even, (part.tolist() for part in parts), strict=True))
        return _flattened([ids_K[k] for k in range(len(texts))])

    def _encode_words(self, content: bytes) -> tuple[Int64Array, Int64Array]:
        with self._lock:
            return self._words.encode(content, self._tokens_of)

    def _tokens_of(self, new: list[bytes]) -> tuple[Int64Array, Int64Array]:
        """The concatenated ids of words that are not in the table, and the number of ids of each."""
        words = [word.decode() for word in new]
        rows: dict[str, list[int]] = {"": []}
        if self._is_bert:
            rows |= self._bert_rows(words)
        others = [word for word in words if word not in rows]
        rows |= zip(others, self._ids(others), strict=True)
        return _flattened([rows[word] for word in words])

    def _bert_rows(self, words: list[str]) -> dict[str, list[int]]:
        """Ids of the words that BERT's normaliser turns into printable ASCII, which a one-line pattern can split.

        The model is called directly: the tokenizer takes three times as long, for offsets and the like.
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


@cache
def _signs_and_accents() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Signs that a normaliser turns into a space, such as ´ (a space with an accent); and words that begin with an
    accent, since nothing may be left of them without it. Two patterns, because each is searched far faster than both
    together."""
    composed = (chr(code) for code in range(0x80, 0x10000) if unicodedata.decomposition(chr(code)))
    signs = "".join(each for each in composed if " " in unicodedata.normalize("NFKD", each))
    accents = "".join(chr(code) for code in range(0x300, 0x10000) if unicodedata.category(chr(code))[0] == "M")
    return re.compile(f"[{signs}]"), re.compile(f" [{accents}]")


def _is_bert(settings: dict[str, Any]) -> bool:
    """Whether words are normalised and split as in BERT, with no additional steps."""
    steps = [(settings[part] or {}).get("type") for part in ("normalizer", "pre_tokenizer")]
    return word_cutting(settings) == "bert" and steps == ["BertNormalizer", "BertPreTokenizer"]


def word_cutting(settings: dict[str, Any]) -> Cutting | None:
    """Where texts without added tokens may be cut such that the ids of the parts are those of the whole; None: nowhere.

    Args:
        settings: the content of tokenizer.json.
    """
    in_normalised = any(not token["special"] and token["normalized"] for token in settings["added_tokens"])
    if in_normalised or settings["model"].get("dropout"):
        return None
    cutting = _cutting_of(_steps(settings["pre_tokenizer"], "pretokenizers"))
    local = all(_is_local(step, cutting) for step in _steps(settings["normalizer"], "normalizers"))
    return cutting if local else None


def _cutting_of(steps: list[dict[str, Any]]) -> Cutting | None:
    """Where the pre-tokenizer's first step that splits any text splits it."""
    first = steps[0] if steps else {"type": None}
    if steps[1:] and first == _FIRST_SPACE:
        first = {**steps[1], "add_prefix_space": True}
    if first["type"] == "BertPreTokenizer":
        return "bert"
    if first["type"] == "Metaspace" and first.get("split", True) and first.get("prepend_scheme") == "always":
        return "single-space"
    if first["type"] == "Split" and first.get("pattern") == {"Regex": WORDS_WITH_MARKS}:
        return "single-space" if first.get("add_prefix_space") else "before-space"
    if first["type"] == "ByteLevel" and first.get("use_regex", True):
        return "single-space" if first["add_prefix_space"] else "before-space"
    return None


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [step for child in part[key] for step in _steps(child, key)] if part["type"] == "Sequence" else [part]


def _is_local(step: dict[str, Any], cutting: Cutting | None) -> bool:
    """Whether this normaliser treats each word of an evenly spaced text independently, and leaves it its spaces."""
    if step["type"] == "Replace":
        pattern, content = step["pattern"].get("String") or step["pattern"]["Regex"], step["content"]
        if pattern == " {2,}" or (pattern, content) == (r"\s+", " "):
            return True  # it changes nothing in an evenly spaced text
        reads_spaces, fills_words = " " in pattern or r"\s" in pattern, content and " " not in content
        return not reads_spaces and bool(cutting == "bert" or fills_words)
    if step["type"] == "Strip":
        return cutting != "before-space"
    return step["type"] in _LOCAL_NORMALIZERS or (step["type"] == "BertNormalizer" and cutting == "bert")


def _flattened(rows: list[list[int]]) -> tuple[Int64Array, Int64Array]:
    length_K = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int64, int(length_K.sum())), length_K
