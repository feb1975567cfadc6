"""Documents that are nearly the same as an earlier one: MinHash of their token 5-grams, and locality-sensitive hashing.

Broder 1997, "On the resemblance and containment of documents"; Lee et al. 2022, "Deduplicating training data makes
language models better", arXiv:2107.06499, section 4.2, for 5-grams of tokens. The similarity of two documents is the
Jaccard index of their sets of 5-grams: how many both have, divided by how many either has. It is estimated by the share
of 128 hash functions whose least value is the same in both. Only documents that agree in all functions of a band are
compared. Of each least value one byte is kept (Li and König 2010, "b-bit minwise hashing", arXiv:0910.3349), so a
document takes 256 bytes at a similarity of 0.8, and 640 at 0.5.

Shapes: D documents, F hash functions, B bands, T tokens, G 5-grams of a part, P pairs of documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bertkit.arrays import BoolArray, Float64Array, Int64Array, Uint64Array
from bertkit.data.duplicates import document_hashes, in_cache, mixed
from bertkit.data.shards import TokenShards

GRAM = 5
"""Tokens of an n-gram; a shorter document has one, all of its tokens."""
FUNCTIONS = 128
_TOKENS_AT_ONCE = 1 << 16
_FOUND = 0.9
"""Least probability that two documents of the similarity in question agree in some band."""
_KEPT_BITS = np.uint64(24)
"""The lowest bit of the byte that is kept: the highest bits of a least value are zeros, the lowest mixed least."""

_ORDER = np.uint64(0x9E3779B97F4A7C15)
"""Makes the hash of a 5-gram depend on the order of its tokens."""

Bytes = NDArray[np.uint8]


def near_duplicates(shards: TokenShards, similarity: float, cache: Path | None) -> BoolArray:
    """Whether an earlier document is estimated to have this similarity or more, (D,).

    Args:
        shards: the corpus.
        similarity: from 0.5 to 1.
        cache: as for `document_hashes`.
    """
    return in_cache(
        shards,
        cache,
        f"near-{similarity}",
        lambda: _near_duplicates(shards, similarity, cache),
        "data/duplicates.py",
        "data/near_duplicates.py",
    )


def _near_duplicates(shards: TokenShards, similarity: float, cache: Path | None) -> BoolArray:
    byte_DF, band_BD = _signatures(shards, rows_of_a_band(similarity), cache)
    is_near_D = np.zeros(shards.num_documents, dtype=np.bool_)
    for band_D in band_BD:
        order_D = np.argsort(band_D, kind="stable")
        agrees_D = np.append(False, band_D[order_D[1:]] == band_D[order_D[:-1]])
        first_D = np.maximum.accumulate(np.where(agrees_D, 0, np.arange(agrees_D.size)))
        later_P = np.flatnonzero(agrees_D)
        for earlier_P in (later_P - 1, first_D[later_P]):
            similarity_P = _similarity(byte_DF, order_D[earlier_P], order_D[later_P])
            is_near_D[order_D[later_P[similarity_P >= similarity]]] = True
    return is_near_D


def rows_of_a_band(similarity: float) -> int:
    """Functions of a band: the most, a power of two, with which similar documents are found."""
    rows = FUNCTIONS
    while 1 - (1 - similarity**rows) ** (FUNCTIONS // rows) < _FOUND:
        rows //= 2
    return rows


def _similarity(byte_DF: Bytes, one_P: Int64Array, other_P: Int64Array) -> Float64Array:
    """The estimated similarity of each pair, (P,): equal bytes, less those that are equal by chance."""
    parts = np.arange(_TOKENS_AT_ONCE, one_P.size, _TOKENS_AT_ONCE)
    pairs = zip(np.split(one_P, parts), np.split(other_P, parts), strict=True)
    equal_P = np.concatenate([(byte_DF[one] == byte_DF[other]).mean(axis=1) for one, other in pairs])
    similarity_P: Float64Array = (equal_P - 1 / 256) / (1 - 1 / 256)
    return similarity_P


def _signatures(shards: TokenShards, rows: int, cache: Path | None) -> tuple[Bytes, Uint64Array]:
    """A byte of the least value of each function, (D, F), and a hash of the least values of each band, (B, D)."""
    factor_F = np.random.Generator(np.random.Philox(0)).integers(1 << 63, size=FUNCTIONS, dtype=np.uint64)
    factor_F = factor_F << np.uint64(1) | np.uint64(1)
    byte_DF = np.zeros((shards.num_documents, FUNCTIONS), dtype=np.uint8)
    band_BD = np.zeros((FUNCTIONS // rows, shards.num_documents), dtype=np.uint64)
    place_R = np.arange(rows)
    for own, least_FD in _least_values(shards, factor_F, document_hashes(shards, cache)):
        byte_DF[own] = (least_FD.T >> _KEPT_BITS).astype(np.uint8)
        banded_BRD = mixed(least_FD.reshape(-1, rows, least_FD.shape[1]), place_R[:, None])
        band_BD[:, own] = banded_BRD.sum(axis=1, dtype=np.uint64)
    return byte_DF, band_BD


def _least_values(
    shards: TokenShards, factor_F: Uint64Array, hash_D: Uint64Array
) -> Iterator[tuple[slice, Uint64Array]]:
    """Some documents, and the least value of each function over their 5-grams, (F, these)."""
    start_D1 = shards.segment_start_S1[shards.document_start_D1]
    first = 0
    while first < shards.num_documents:
        fitting = int(np.searchsorted(start_D1, start_D1[first] + _TOKENS_AT_ONCE, side="right")) - 1
        own = slice(first, max(fitting, first + 1))
        least_FD = hash_D[own] * factor_F[:, None]
        long_D = np.flatnonzero(np.diff(start_D1[own.start : own.stop + 1]) >= GRAM)
        least_FD[:, long_D] = np.iinfo(np.uint64).max
        for gram_G, begin_D in _grams(shards, start_D1[own.start : own.stop + 1], long_D):
            for least_D, factor in zip(least_FD, factor_F, strict=True):
                least_D[long_D] = np.minimum(least_D[long_D], np.minimum.reduceat(gram_G * factor, begin_D))
        yield own, least_FD
        first = own.stop


def _grams(shards: TokenShards, start_D1: Int64Array, long_D: Int64Array) -> Iterator[tuple[Uint64Array, Int64Array]]:
    """A hash of each 5-gram of those of consecutive documents that have some, and where each document's begin, (G,) and
    (of `long_D`,); of a single document that is long, a part at a time."""
    first, end = int(start_D1[0]), int(start_D1[-1])
    for low in range(first, end - GRAM + 1, _TOKENS_AT_ONCE):
        token_T = mixed(shards.tokens_between(low, min(low + _TOKENS_AT_ONCE + GRAM - 1, end)), np.zeros(1, np.int64))
        all_G = token_T[: token_T.size - GRAM + 1]
        for place in range(1, GRAM):
            all_G = all_G * _ORDER + token_T[place : place + all_G.size]
        grams_D = np.minimum(np.diff(start_D1)[long_D] - GRAM + 1, all_G.size)
        begin_D = np.cumsum(grams_D) - grams_D
        own_G = np.arange(grams_D.sum()) + np.repeat(start_D1[long_D] - first - begin_D, grams_D)
        yield all_G[own_G], begin_D
