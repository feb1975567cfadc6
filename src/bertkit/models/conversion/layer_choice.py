"""Pairs of student and teacher layers for distillation, and the teacher layers that initialise a student.

For comparison, layers are counted from 1, and 0 is the embeddings. For copying, layers are counted from 0, as in names
of weights. The names:

    for comparison, student layer m of M from a teacher layer of N
        uniform   m from m N / M, the last from the last     TinyBERT, arXiv:1909.10351, section 4.2
        skip      uniform without the last                   PKD-Skip, arXiv:1908.09355, section 3.2
        last      m from N - M + m, without the last         PKD-Last
        first     m from m
        top       only the last from the last                DistilBERT's cosine loss, arXiv:1910.01108
    for copying, M layers of N
        first     0, 1, ..., M - 1                           PKD; Theseus, arXiv:2002.02925
        last      N - M, ..., N - 1
        uniform   M evenly spaced layers, including the first and the last: 0, 2, 4, 7, 9, 11 of 12, as in
                  DistilBERT's released extraction
        skip      the last of each of M equal blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from bertkit.errors import UsageError

MapName = Literal["uniform", "skip", "last", "first", "top"]
ChoiceName = Literal["first", "last", "uniform", "skip"]
Pairs = tuple[tuple[int, int], ...]
"""(student's layer, teacher's layer), counted from 1; 0 is the embeddings."""


def layer_map(wanted: MapName | Sequence[Sequence[int]], *, student: int, teacher: int) -> Pairs:
    """The pairs of layers that are compared.

    Args:
        wanted: a name, or the pairs themselves.
        student, teacher: their numbers of layers, M and N.

    Raises:
        UsageError: a pair out of range, a name that pairs the layers of a student deeper than its teacher, or one
            that gives no pair.
    """
    if not isinstance(wanted, str):
        return _checked(wanted, student, teacher)
    if student > teacher and wanted != "top":
        raise UsageError(
            f"layers: {wanted!r} maps a student of {student} layers to a teacher of {teacher}, which has fewer; write"
            " the pairs as a list, such as [[1, 1], [2, 1]], or use a student that is no deeper"
        )
    each = range(1, student + 1)
    pairs: dict[str, list[tuple[int, int]]] = {
        "uniform": [(m, _share(m, teacher, student)) for m in each],
        "skip": [(m, _share(m, teacher, student)) for m in each[:-1]],
        "last": [(m, teacher - student + m) for m in each[:-1]],
        "first": [(m, m) for m in each],
        "top": [(student, teacher)],
    }
    if not pairs[wanted]:
        raise UsageError(f"layers: {wanted!r} leaves nothing to compare for a student of {student} layer")
    return tuple(pairs[wanted])


def chosen_layers(wanted: ChoiceName | Sequence[int], *, of: int, keep: int | None = None) -> list[int]:
    """The layers of a larger model that a smaller one keeps, counted from 0, in ascending order for names.

    Args:
        wanted: a name, or the layers themselves in the order in which they are stacked.
        of: the number of layers.
        keep: number of layers kept; optional if `wanted` is a list.

    Raises:
        UsageError: no such layer, or too many.
    """
    if not isinstance(wanted, str):
        strange = [layer for layer in wanted if not 0 <= layer < of]
        if strange or not wanted or (keep is not None and keep != len(wanted)):
            raise UsageError(
                f"layers: {list(wanted)} for {len(wanted) if keep is None else keep} of {of} layers; they are counted"
                f" from 0 to {of - 1}, one for each layer of the student; or use first, last, uniform or skip"
            )
        return list(wanted)
    if keep is None or not 1 <= keep <= of:
        raise UsageError(f"layers: {wanted!r} of {of} layers needs a number of layers from 1 to {of}, found {keep}")
    found: dict[str, list[int]] = {
        "first": list(range(keep)),
        "last": list(range(of - keep, of)),
        "uniform": [int(layer) for layer in np.rint(np.linspace(0, of - 1, keep))] if keep > 1 else [0],
        "skip": [_share(m, of, keep) - 1 for m in range(1, keep + 1)],
    }
    return found[wanted]


def _share(layer: int, teacher: int, student: int) -> int:
    """m N / M, rounded to the nearest layer, halves down. If N is a multiple of M: the last layer of the m-th block."""
    return -(-(2 * layer * teacher - student) // (2 * student))


def _checked(pairs: Sequence[Sequence[int]], student: int, teacher: int) -> Pairs:
    for pair in pairs:
        if len(pair) != 2 or not 0 <= pair[0] <= student or not 0 <= pair[1] <= teacher:
            raise UsageError(
                f"layers: {list(pair)} is out of range: a pair is [student's layer, teacher's layer], counted from 1 to"
                f" {student} and from 1 to {teacher}, 0 for the embeddings"
            )
    if not pairs:
        raise UsageError("layers: the list is empty; give pairs, or leave the term out")
    return tuple((pair[0], pair[1]) for pair in pairs)
