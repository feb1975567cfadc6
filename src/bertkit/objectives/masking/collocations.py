"""Statistics of phrases in a corpus: its collocations, and which entries of a lexicon occur in it.

Bouma 2009, "Normalized (pointwise) mutual information in collocation extraction": a sequence of n words is a
collocation if ln(p(w1..wn) / (p(w1)...p(wn))) is a large share of its greatest value, -(n - 1) ln p(w1..wn). Counts are
kept in bounded memory by lossy counting (Manku and Motwani 2002, "Approximate frequency counts over data streams"):
when there are too many sequences, the rarest are dropped, so a count may be too low by the number of times that this
happened. Words are identified by hashes of their tokens; the tokens are read again at a sequence's first occurrence.

Shapes: T tokens of a chunk, W words of it, N sequences of words.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from bertkit.arrays import BoolArray, Float64Array, Int64Array, Uint64Array
from bertkit.data.shards import TokenShards
from bertkit.settings import Settings
from bertkit.text.lexicon import PhraseTable
from bertkit.text.words import WordMarks

log = logging.getLogger(__name__)


CHUNK_TOKENS = 1 << 20
KNOWN_SEQUENCES = 1 << 21
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


class Collocations(Settings):
    """Which sequences of words are phrases."""

    longest: int = Field(3, ge=2, le=5, description="Maximum length of a collocation in words; the minimum is two.")
    min_count: int = Field(10, ge=2, description="Minimum number of occurrences of a collocation.")
    min_association: float = Field(
        0.5, gt=-1, le=1, description="Minimum normalised pointwise mutual information; 1: its words never occur apart."
    )
    most: int = Field(
        100_000,
        ge=1,
        description="Maximum number of collocations to keep; those with the strongest association are kept.",
    )

    def mined(self, shards: TokenShards, marks: WordMarks, read_tokens: int) -> list[list[int]]:
        """Token ids of the collocations, strongest first; deterministic for given shards.

        Args:
            shards: the corpus.
            marks: where words begin; words that contain a sign or [UNK] are ignored.
            read_tokens: at most about this many tokens are read, evenly over the corpus.
        """
        words = _Counts()
        sequences = {number: _Counts() for number in range(2, self.longest + 1)}
        total = 0
        for chunk in chunks(shards, marks, read_tokens):
            total += chunk.count_into(words, sequences)
        strengths, places = [], []
        for number, counts in sequences.items():
            if counts.forgotten >= self.min_count:
                log.info("collocations of %d words: counts below about %d were dropped", number, counts.forgotten)
            kept_N = counts.count_N >= self.min_count
            association_N = _association(counts.count_N[kept_N], counts.parts_Nn[kept_N], words, total, number)
            strong_N = association_N >= self.min_association
            strengths.append(association_N[strong_N])
            places.append(counts.place_N2[kept_N][strong_N])
        strength_N, place_N2 = np.concatenate(strengths), np.concatenate(places)
        order_N = np.lexsort((place_N2[:, 0], -strength_N))[: self.most]
        return [shards.tokens_between(start, end).tolist() for start, end in place_N2[order_N].tolist()]


def entries_seen(table: PhraseTable, shards: TokenShards, marks: WordMarks, read_tokens: int) -> BoolArray:
    """Which entries of a list occur in the corpus, or in the part that is read.

    Args:
        table: the list's phrases.
        shards: the corpus.
        marks: where words begin.
        read_tokens: at most about this many tokens are read, evenly over the corpus.
    """
    seen_E = np.zeros(table.found_as_E.size + 1, dtype=np.bool_)
    for chunk in chunks(shards, marks, read_tokens):
        seen_E[table.find(chunk.ids_T, chunk.begins_T, chunk.run_T).entry_P] = True
    # Entries that cannot be tokenised have index -1: the last element, which is never seen.
    return np.asarray(seen_E[table.found_as_E])


@dataclass(frozen=True)
class Chunk:
    """Consecutive whole segments.

    Attributes:
        ids_T: their tokens.
        begins_T: tokens that begin a word.
        run_T: the number of each token's segment.
        start: the first token's place in the corpus.
        marks: where words begin.
    """

    ids_T: Int64Array
    begins_T: BoolArray
    run_T: Int64Array
    start: int
    marks: WordMarks

    def count_into(self, words: _Counts, sequences: dict[int, _Counts]) -> int:
        """Count the words and the sequences of words; returns the number of words."""
        start_W = np.flatnonzero(self.begins_T)
        end_W = np.append(start_W[1:], self.ids_T.size)
        opaque_V = self.marks.sign_V | self.marks.special_V
        is_word_W = ~np.logical_or.reduceat(opaque_V[self.ids_T], start_W)
        offset_T = np.arange(self.ids_T.size) - np.repeat(start_W, end_W - start_W)
        hash_W = np.add.reduceat(_mixed(_mixed(self.ids_T.astype(np.uint64)) + offset_T.astype(np.uint64)), start_W)
        run_W = self.run_T[start_W]
        place_W2 = np.stack([start_W, end_W], axis=1) + self.start
        words.add(hash_W[is_word_W], hash_W[is_word_W][:, None], place_W2[is_word_W])
        for number, counts in sequences.items():
            last = start_W.size - number + 1
            if last <= 0:
                continue
            parts_Nn = np.lib.stride_tricks.sliding_window_view(hash_W, number)
            inside_N = (run_W[:last] == run_W[number - 1 :]) & np.lib.stride_tricks.sliding_window_view(
                is_word_W, number
            ).all(axis=1)
            parts_Nn = parts_Nn[inside_N]
            hash_N = parts_Nn[:, 0]
            for column in range(1, number):
                hash_N = _mixed(hash_N) + parts_Nn[:, column]
            place_N2 = np.stack([place_W2[:last, 0], place_W2[number - 1 :, 1]], axis=1)[inside_N]
            counts.add(hash_N, parts_Nn, place_N2)
        return int(is_word_W.sum())


def chunks(shards: TokenShards, marks: WordMarks, read_tokens: int) -> Iterator[Chunk]:
    """The corpus in chunks of about a million tokens; only every n-th if it is larger than `read_tokens`."""
    segment_start_S1 = shards.segment_start_S1
    number = max(1, -(-shards.tokens // CHUNK_TOKENS))
    step = max(1, -(-shards.tokens // max(read_tokens, 1)))
    edges = np.searchsorted(segment_start_S1, np.linspace(0, shards.tokens, number + 1).astype(np.int64))
    for first, last in zip(edges[:-1:step].tolist(), edges[1::step].tolist(), strict=True):
        if first == last:
            continue
        starts_S1 = segment_start_S1[first : last + 1]
        ids_T = shards.tokens_between(int(starts_S1[0]), int(starts_S1[-1]))
        run_T = np.repeat(np.arange(last - first), np.diff(starts_S1))
        opens_T = np.concatenate([[True], run_T[1:] != run_T[:-1]])
        yield Chunk(ids_T, marks.begins_T(ids_T, opens_T), run_T, int(starts_S1[0]), marks)


class _Counts:
    """Counts of sequences of words, in bounded memory.

    Attributes:
        hash_N: the hash of each sequence, ascending.
        count_N: the number of its occurrences.
        parts_Nn: hashes of its n words.
        place_N2: its first occurrence, from token to token.
        forgotten: by how much counts may be too low.
    """

    def __init__(self) -> None:
        self.hash_N: Uint64Array = np.zeros(0, np.uint64)
        self.count_N: Int64Array = np.zeros(0, np.int64)
        self.parts_Nn: Uint64Array = np.zeros((0, 0), np.uint64)
        self.place_N2: Int64Array = np.zeros((0, 2), np.int64)
        self.forgotten = 0

    def add(self, hash_N: Uint64Array, parts_Nn: Uint64Array, place_N2: Int64Array) -> None:
        """Add these counts; they come from later in the corpus than all previous ones."""
        if not self.parts_Nn.size:
            self.parts_Nn = np.zeros((0, parts_Nn.shape[1]), np.uint64)
        hashes = np.concatenate([self.hash_N, hash_N])
        counts = np.concatenate([self.count_N, np.ones(hash_N.size, np.int64)])
        self.hash_N, first_N, which = np.unique(hashes, return_index=True, return_inverse=True)
        self.count_N = np.bincount(which, weights=counts, minlength=self.hash_N.size).astype(np.int64)
        self.parts_Nn = np.concatenate([self.parts_Nn, parts_Nn])[first_N]
        self.place_N2 = np.concatenate([self.place_N2, place_N2])[first_N]
        while self.hash_N.size > KNOWN_SEQUENCES:
            self.forgotten += 1
            kept_N = self.count_N > self.forgotten
            self.hash_N, self.count_N = self.hash_N[kept_N], self.count_N[kept_N]
            self.parts_Nn, self.place_N2 = self.parts_Nn[kept_N], self.place_N2[kept_N]

    def counts_of(self, hash_N: Uint64Array) -> Int64Array:
        """How often these were seen; at least 1, since dropped sequences were seen, too."""
        if not self.hash_N.size:
            return np.ones(hash_N.size, np.int64)
        at_N = np.minimum(np.searchsorted(self.hash_N, hash_N), self.hash_N.size - 1)
        return np.where(self.hash_N[at_N] == hash_N, self.count_N[at_N], max(1, self.forgotten))


def _association(count_N: Int64Array, parts_Nn: Uint64Array, words: _Counts, total: int, number: int) -> Float64Array:
    """Normalised pointwise mutual information of sequences, at most 1."""
    log_p_N = np.log(count_N / max(1, total))
    log_apart_N = sum(
        (np.log(words.counts_of(part_N) / max(1, total)) for part_N in parts_Nn.T), np.zeros(count_N.size)
    )
    # A sequence that is the whole text has probability 1.
    room_N = np.maximum(-(number - 1) * log_p_N, np.finfo(np.float64).tiny)
    association_N: Float64Array = (log_p_N - log_apart_N) / room_N
    return association_N


def _mixed(hash_N: Uint64Array) -> Uint64Array:
    """Hashes with their bits mixed, so that sums of a few of them do not collide."""
    mixed = (hash_N ^ (hash_N >> _SHIFT)) * _MULTIPLIER + _MULTIPLIER
    return np.asarray(mixed ^ (mixed >> _SHIFT))
