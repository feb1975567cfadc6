"""Phrases in token ids: read from a file and found in text, whole words only, longest first.

Sun et al. 2019, ERNIE 1.0, arXiv:1904.09223, section 3.2, masks phrases and entities found by chunkers and
dictionaries; here a list of phrases is enough. Not from a paper: a phrase is identified by hashes of its prefixes, so
that a batch is searched without a loop over its tokens. Every match is compared token by token, so no hash decides.

Shapes: T tokens, E entries, N phrases (forms of entries), L their maximum length, W whole phrases of one length, C
candidate positions, P matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertkit.arrays import BoolArray, Int64Array, Uint64Array
from bertkit.errors import DataError
from bertkit.text.lines import read_lines
from bertkit.text.tokenizer import Tokenizer

LONGEST_PHRASE = 64
"""Maximum number of tokens of a phrase; a longer line is a text."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def read_lexicon(path: Path) -> list[str]:
    """The phrases of a text file, one per line, without duplicates; blank lines are ignored.

    Raises:
        DataError: the file cannot be read, or contains no phrase.
    """
    lines = (line.strip() for part in read_lines(path) for line in part)
    phrases = list(dict.fromkeys(line for line in lines if line))
    if not phrases:
        raise DataError(f"{path}: contains no phrase; write one phrase per line")
    return phrases


@dataclass(frozen=True)
class Finds:
    """Phrases found in text.

    Attributes:
        start_P: start of each, ascending.
        length_P: number of tokens of each.
        entry_P: index of each one's entry in the list.
    """

    start_P: Int64Array
    length_P: Int64Array
    entry_P: Int64Array


class PhraseTable:
    """Phrases to search for; plain data, so that it can be sent to workers.

    Args:
        phrases: token ids; none empty.
        entries: for each phrase, the entry of a list that it is a form of; None: its own index.
        found_as_E: as the attribute; None: every phrase is found as itself.

    Attributes:
        found_as_E: for each entry of the list, the entry as which it is found. This is another entry if both have the
            same ids, or -1 if the vocabulary cannot write it, or needs more than `LONGEST_PHRASE` tokens.
    """

    def __init__(
        self,
        phrases: Sequence[Sequence[int]],
        entries: Sequence[int] | None = None,
        found_as_E: Int64Array | None = None,
    ) -> None:
        length_N = np.array([len(phrase) for phrase in phrases], dtype=np.int64)
        ids_NL = np.full((length_N.size, int(length_N.max(initial=0))), -1, dtype=np.int64)
        for row, phrase in enumerate(phrases):
            ids_NL[row, : len(phrase)] = phrase
        self.entry_N = np.arange(length_N.size) if entries is None else np.asarray(entries, dtype=np.int64)
        self.found_as_E = self.entry_N if found_as_E is None else found_as_E
        self.ids_NL = ids_NL
        self._firsts = np.unique(ids_NL[:, 0]) if ids_NL.size else np.zeros(0, np.int64)
        self._beginnings: list[Uint64Array] = []
        self._wholes: list[tuple[Uint64Array, Int64Array]] = []
        hash_N = np.zeros(length_N.size, dtype=np.uint64)
        for column in range(ids_NL.shape[1]):
            hash_N = _extended(hash_N, ids_NL[:, column])
            ends_N, goes_on_N = length_N == column + 1, length_N > column + 1
            row_N = np.flatnonzero(ends_N)
            row_N = row_N[np.argsort(hash_N[row_N], kind="stable")]
            self._wholes.append((hash_N[row_N], row_N))
            self._beginnings.append(np.unique(hash_N[goes_on_N]))

    @classmethod
    def of_texts(cls, texts: Sequence[str], tokenizer: Tokenizer) -> PhraseTable:
        """Phrases in the forms in which a tokenizer writes them at the beginning of a segment and inside one."""
        phrases: dict[tuple[int, ...], int] = {}
        found_as_E = np.full(len(texts), -1, dtype=np.int64)
        unknown = tokenizer.unk_id if "unk" in tokenizer.roles else -1
        for forms in ([f" {text}" for text in texts], texts):
            ids_T, count_E = tokenizer.encode_plain(forms)
            for entry, ids in enumerate(np.split(ids_T, np.cumsum(count_E)[:-1])):
                if 0 < ids.size <= LONGEST_PHRASE and unknown not in ids:
                    owner = phrases.setdefault(tuple(ids.tolist()), entry)
                    found_as_E[entry] = owner if found_as_E[entry] < 0 else found_as_E[entry]
        return cls(list(phrases), list(phrases.values()), found_as_E)

    def find(self, ids_T: Int64Array, begins_T: BoolArray, run_T: Int64Array) -> Finds:
        """Non-overlapping phrases in text: longer ones take precedence, then those further left.

        Args:
            ids_T: the text.
            begins_T: tokens that begin a word; a phrase begins at one, and ends before one or with its run.
            run_T: a number for each run of tokens, beyond which a phrase may not extend; negative where no phrase may
                be.
        """
        if not ids_T.size:
            return Finds(*(np.zeros(0, np.int64) for _ in range(3)))
        border_T1 = np.concatenate([begins_T, [True]])
        border_T1[1:-1] |= run_T[1:] != run_T[:-1]
        place_C = np.flatnonzero(begins_T & (run_T >= 0) & _among(ids_T, self._firsts))
        hash_C = np.zeros(place_C.size, dtype=np.uint64)
        found: list[tuple[Int64Array, Int64Array]] = []
        for column, (hash_W, row_W) in enumerate(self._wholes):
            end_C = np.minimum(place_C + column, ids_T.size - 1)
            inside_C = (end_C == place_C + column) & (run_T[end_C] == run_T[place_C])
            place_C, end_C = place_C[inside_C], end_C[inside_C]
            hash_C = _extended(hash_C[inside_C], ids_T[end_C])
            whole_C = border_T1[end_C + 1] & _among(hash_C, hash_W)
            row_P = row_W[np.searchsorted(hash_W, hash_C[whole_C])]
            found.append(self._really_there(place_C[whole_C], row_P, ids_T, column + 1))
            goes_on_C = _among(hash_C, self._beginnings[column])
            place_C, hash_C = place_C[goes_on_C], hash_C[goes_on_C]
        return self._not_overlapping(found, ids_T.size)

    def _really_there(
        self, place_P: Int64Array, row_P: Int64Array, ids_T: Int64Array, length: int
    ) -> tuple[Int64Array, Int64Array]:
        """Positions and rows of the table, without those that match only by the hash."""
        equal_P = (ids_T[place_P[:, None] + np.arange(length)] == self.ids_NL[row_P, :length]).all(axis=1)
        return place_P[equal_P], row_P[equal_P]

    def _not_overlapping(self, found: list[tuple[Int64Array, Int64Array]], tokens: int) -> Finds:
        """The matches of each length, from 1, without those that overlap a longer or earlier one."""
        taken_T = np.zeros(tokens, dtype=np.bool_)
        kept: list[tuple[Int64Array, Int64Array, Int64Array]] = []
        for length in range(len(found), 0, -1):
            place_P, row_P = found[length - 1]
            offset_L = np.arange(length)
            free_P = ~taken_T[place_P[:, None] + offset_L].any(axis=1)
            place_P, row_P = place_P[free_P], row_P[free_P]
            while place_P.size:
                # Nothing on the left overlaps the first match of a cluster; matches that this one overlaps are dropped.
                leads_P = np.diff(place_P, prepend=-length) >= length
                leader_P = place_P[leads_P][np.cumsum(leads_P) - 1]
                kept.append((place_P[leads_P], np.full(int(leads_P.sum()), length), row_P[leads_P]))
                taken_T[place_P[leads_P][:, None] + offset_L] = True
                place_P, row_P = (part[place_P - leader_P >= length] for part in (place_P, row_P))
        if not kept:
            return Finds(*(np.zeros(0, np.int64) for _ in range(3)))
        start_P, length_P, row_P = (np.concatenate(part) for part in zip(*kept, strict=True))
        order_P = np.argsort(start_P)
        return Finds(start_P[order_P], length_P[order_P], self.entry_N[row_P[order_P]])


def _extended(hash_N: Uint64Array, id_N: Int64Array) -> Uint64Array:
    """The hash of a sequence and one more token."""
    mixed = (hash_N ^ (id_N + 1).astype(np.uint64)) * _MULTIPLIER
    return np.asarray(mixed ^ (mixed >> _SHIFT))


def _among(value_C: NDArray[Any], sorted_N: NDArray[Any]) -> BoolArray:
    """Which values occur in a sorted list."""
    if not sorted_N.size:
        return np.zeros(value_C.size, dtype=np.bool_)
    at_C = np.minimum(np.searchsorted(sorted_N, value_C), sorted_N.size - 1)
    return np.asarray(sorted_N[at_C] == value_C)
