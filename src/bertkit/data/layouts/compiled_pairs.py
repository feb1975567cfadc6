"""The pairs of a large text, listed in C++: the same as PairPlanner's loop (pairs.py), many times faster.

Not from a paper. Building the library takes half a second, once per version (native.py). It is optional: without it the
pairs are the same.

Shapes: S segments, N documents, D chunks of a call, R pairs of a call.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np

from bertkit.arrays import Float64Array, Int64Array
from bertkit.native import CompilerError, build_library, library_file

SOURCE = Path(__file__).with_name("pairs.cpp")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")
CHUNKS = 1 << 15
"""Maximum number of chunks of a call."""
NUMBERS = 6
"""Numbers of a pair before it is truncated."""

log = logging.getLogger(__name__)


@cache
def pairs_library() -> ctypes.CDLL | None:
    """The library, built if necessary; None, with a message, if there is no compiler."""
    try:
        path = library_file([SOURCE], FLAGS, {"machine": platform.machine(), "libc": platform.libc_ver()})
        build_library(path, [SOURCE], FLAGS)
        library = ctypes.CDLL(str(path))
    except (CompilerError, OSError) as error:
        log.info("pairs of segments are listed without a compiled loop, several times slower: %s", error)
        return None
    pointer, size, real, switch = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int32
    library.pairs_list.restype = switch
    two = [pointer, pointer]
    library.pairs_list.argtypes = [*two, size, *two, size, real, real, switch, size, *two]
    return library


def listed_pairs(
    library: ctypes.CDLL,
    segment_start_S1: Int64Array,
    documents_N2: Int64Array,
    target_N: Int64Array | None,
    *,
    draws: Callable[[int, int], Float64Array],
    other_document: Callable[[int, int], int],
    random_partner_probability: float,
    swap_probability: float,
    pairs_lone_segments: bool,
) -> Iterator[Int64Array]:
    """The pairs of all documents before truncation, some at a time, each of shape (R, 6).

    Args:
        target_N: tokens of each document's chunks; None: chunks of two segments.
        draws: given a chunk's number and D, the draws of the chunks from there on, of shape (D, 5).
        other_document: given a chunk's number and document, its random partner, if the first one drawn was the document
            itself.
    """
    arrays = [np.ascontiguousarray(array, dtype=np.int64) for array in (segment_start_S1, documents_N2)]
    targets = None if target_N is None else np.ascontiguousarray(target_N, dtype=np.int64)
    state = np.zeros(4, dtype=np.int64)  # document, segment, chunks and pairs of this call
    first = 0
    while state[0] < len(documents_N2):
        draw_D5 = np.ascontiguousarray(draws(first, CHUNKS))
        rows = np.empty((CHUNKS, NUMBERS), dtype=np.int64)
        state[2:] = 0
        partner, addresses = -1, [ctypes.c_void_p(array.ctypes.data) for array in (*arrays, draw_D5, state, rows)]
        while library.pairs_list(
            *addresses[:2],
            len(documents_N2),
            None if targets is None else ctypes.c_void_p(targets.ctypes.data),
            addresses[2],
            CHUNKS,
            random_partner_probability,
            swap_probability,
            pairs_lone_segments,
            partner,
            *addresses[3:],
        ):
            partner = other_document(first + int(state[2]), int(state[0]))
        first += int(state[2])
        yield rows[: state[3]]
