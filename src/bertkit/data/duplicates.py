"""Documents that occur more than once in a corpus, found by a hash of their tokens.

Lee et al. 2022, "Deduplicating training data makes language models better", arXiv:2107.06499, of which this is the
exact form for whole documents. Each token is mixed with its place in the document by
splitmix64's finaliser (Steele et al. 2014) and the results are summed, so a corpus is read once, a part at a time, in
any number of parts. Among ten million different documents, two have the same 64 bits with a probability of 3e-6.

Shapes: D documents, T tokens of a part, N ranges of segments.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertkit.arrays import BoolArray, Int64Array, Uint64Array, save_array
from bertkit.cache import identity_hash
from bertkit.code_hash import code_sha256
from bertkit.data.layouts.base import Ranges
from bertkit.data.shards import TokenShards
from bertkit.files import one_at_a_time, replacing

_TOKENS_AT_ONCE = 1 << 18
_PLACE, _TOKEN = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_MIX = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))


def first_occurrences(shards: TokenShards, cache: Path | None) -> BoolArray:
    """Whether no earlier document of the corpus has the same tokens, (D,).

    Args:
        shards: the corpus.
        cache: where the documents' hashes are kept, since a large text takes a minute; None: they are not kept.
    """
    _, first_K = np.unique(document_hashes(shards, cache), return_index=True)
    is_first_D = np.zeros(shards.num_documents, dtype=np.bool_)
    is_first_D[first_K] = True
    return is_first_D


def repeated_tokens(shards: TokenShards, training_N2: Ranges, held_out_N2: Ranges, cache: Path | None) -> int:
    """Held-out tokens of whole documents that are whole documents of the training text, too."""
    hash_D = document_hashes(shards, cache)
    training_N, held_out_N = (_whole_documents(shards, each_N2) for each_N2 in (training_N2, held_out_N2))
    document_N = held_out_N[np.isin(hash_D[held_out_N], hash_D[training_N])]
    start_D1 = shards.document_start_D1
    segment_N2 = np.stack([start_D1[document_N], start_D1[document_N + 1]], axis=1)
    return int(np.diff(shards.segment_start_S1[segment_N2]).sum())


def document_hashes(shards: TokenShards, cache: Path | None = None) -> Uint64Array:
    """64 bits of each document that depend on all of its tokens, (D,); see `first_occurrences`."""
    return in_cache(shards, cache, "documents", lambda: _hashes(shards), "data/duplicates.py")


def in_cache(
    shards: TokenShards, cache: Path | None, name: str, compute: Callable[[], NDArray[Any]], *code: str
) -> NDArray[Any]:
    """An array about a corpus that this code computes, from a file in the cache or written to it.

    Args:
        shards: the corpus.
        cache: a directory; None: the array is computed each time.
        name: of the file.
        compute: makes the array.
        code: the modules that decide the result.
    """
    if cache is None:
        return compute()
    identity = {"documents": shards.fingerprint, "code": code_sha256(*code)}
    path = cache / identity_hash(identity) / f"{name}.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(path.with_suffix(".lock"), path):
            if not path.exists():
                array = compute()
                with replacing(path) as file:
                    save_array(file, array)
    stored: NDArray[Any] = np.load(path, mmap_mode="r")
    return stored


def _hashes(shards: TokenShards) -> Uint64Array:
    start_D1 = shards.segment_start_S1[shards.document_start_D1]
    hash_D = np.zeros(shards.num_documents, dtype=np.uint64)
    for first in range(0, shards.tokens, _TOKENS_AT_ONCE):
        end = min(first + _TOKENS_AT_ONCE, shards.tokens)
        low, high = (np.searchsorted(start_D1, [first, end - 1], side="right") - 1).tolist()
        own = slice(low, high + 1)
        begin_D = np.maximum(start_D1[own], first) - first
        tokens_D = np.diff(begin_D, append=end - first)
        place_T = np.arange(first, end) - np.repeat(start_D1[own], tokens_D)
        hash_D[own] += np.add.reduceat(mixed(shards.tokens_between(first, end), place_T), begin_D)
    return hash_D


def mixed(ids_T: NDArray[Any], place_T: NDArray[Any]) -> Uint64Array:
    """A random-looking number for each token, or other integer, at its place; both broadcast."""
    bits_T = place_T.astype(np.uint64) * _PLACE + ids_T.astype(np.uint64) * _TOKEN
    for shift, factor in _MIX:
        bits_T = (bits_T ^ (bits_T >> np.uint64(shift))) * factor
    mixed_T: Uint64Array = bits_T ^ (bits_T >> np.uint64(31))
    return mixed_T


def _whole_documents(shards: TokenShards, ranges_N2: Ranges) -> Int64Array:
    """The numbers of the documents that are whole among the ranges."""
    start_D1 = shards.document_start_D1
    document_N = np.searchsorted(start_D1[:-1], ranges_N2[:, 0], side="right") - 1
    is_whole_N = (start_D1[document_N] == ranges_N2[:, 0]) & (start_D1[document_N + 1] == ranges_N2[:, 1])
    whole: Int64Array = document_N[is_whole_N]
    return whole
