"""Which text is trained on and which is held out: whole documents, or the ends of documents if the text is short.

Not from a paper. From a text of many documents, a share is held out, chosen by a draw on their numbers. If that gives
too few tokens (for example a novel whose documents are paragraphs) or far too many (for example one book among many
letters), documents are taken in the order of the same draw until there are enough tokens, then the last segments of
documents that are too long to be taken whole. Sibling stream.py makes samples of both parts.

Shapes: N documents.
"""

from __future__ import annotations

import math

import numpy as np

from bertkit.arrays import BoolArray, Float64Array, Int64Array
from bertkit.data.layouts.base import Ranges
from bertkit.data.random import Draw
from bertkit.data.shards import TokenShards
from bertkit.errors import DataError

_FEW_DOCUMENTS = 50
MOST_OF_A_SHORT_TEXT = 0.1
"""The maximum share of a text that is held out to reach `least_tokens`."""
_FAR_OFF = 4
"""By which factor the tokens of the chosen documents may differ from their share of the text."""


def split_documents(
    shards: TokenShards,
    held_out: float,
    seed: int,
    documents: range | None = None,
    *,
    least_tokens: int = 0,
    whole: bool = False,
    kept_D: BoolArray | None = None,
) -> tuple[Ranges, Ranges]:
    """Training and held-out text, as ranges of segments, each of shape N x 2.

    Whole documents are held out, chosen by a draw on their number. In a corpus of fewer than 50 documents, the last
    segments of each document are held out instead, so that a text without blank lines can be trained on, too. With
    `least_tokens` this choice is used if it has enough tokens and not far more than its share; else see `_by_tokens`.

    Args:
        shards: the corpus.
        held_out: share of the documents; of the tokens, if document lengths are too unequal.
        seed: of the draw.
        documents: a stretch of the corpus to split as a corpus of its own; None: all of it.
        least_tokens: minimum number of tokens to hold out, or a tenth of the text if that is less; 0: documents count,
            not tokens.
        whole: hold out a share of whole documents, however few there are.
        kept_D: the documents of the corpus that belong to either part; None: all.

    Raises:
        DataError: the corpus has fewer than two segments.
    """
    documents = range(shards.num_documents) if documents is None else documents
    starts_D1 = shards.document_start_D1[documents.start : documents.stop + 1]
    documents_N2 = np.stack([starts_D1[:-1], starts_D1[1:]], axis=1).astype(np.int64)
    number_N = np.arange(documents.start, documents.stop)
    if kept_D is not None:
        number_N = number_N[kept_D[number_N]]
        documents_N2 = documents_N2[number_N - documents.start]
    uniform_N = Draw(seed).uniform("held-out", sample=number_N)
    training, held = _by_documents(documents_N2, held_out, uniform_N, whole=whole)
    if least_tokens and not whole:
        total = range_tokens(shards, documents_N2)
        least = min(least_tokens, MOST_OF_A_SHORT_TEXT * total)
        share, found = held_out * total, range_tokens(shards, held)
        if found < max(least, share / _FAR_OFF) or found > max(least, share) * _FAR_OFF:
            training, held = _by_tokens(shards, documents_N2, max(least, share), uniform_N)
    if not len(held) or not len(training):
        raise DataError(
            f"{shards.name}: the corpus has {int(np.diff(documents_N2).sum())} segment(s) in {len(documents_N2)}"
            " document(s), too few to hold any out; give more text"
        )
    return training, held


def range_tokens(shards: TokenShards, ranges_N2: Ranges) -> int:
    """The tokens in ranges of segments."""
    return int((shards.segment_start_S1[ranges_N2[:, 1]] - shards.segment_start_S1[ranges_N2[:, 0]]).sum())


def _by_documents(
    documents_N2: Ranges, held_out: float, uniform_N: Float64Array, *, whole: bool
) -> tuple[Ranges, Ranges]:
    """A share of the documents, regardless of their lengths; with few documents, the same share of each document's
    segments, unless documents stay whole."""
    if len(documents_N2) < _FEW_DOCUMENTS and not whole:
        length_N = documents_N2[:, 1] - documents_N2[:, 0]
        kept_N = np.where(length_N > 1, np.minimum(np.ceil(length_N * (1 - held_out)), length_N - 1), length_N)
        return _cut(documents_N2, documents_N2[:, 0] + kept_N.astype(np.int64))
    threshold = max(held_out, float(np.sort(uniform_N)[0]))
    return documents_N2[uniform_N > threshold], documents_N2[uniform_N <= threshold]


def _by_tokens(
    shards: TokenShards, documents_N2: Ranges, wanted: float, uniform_N: Float64Array
) -> tuple[Ranges, Ranges]:
    """Documents in the order of their draws, as long as they fit into `wanted` tokens, then ends of the others.

    With few documents only ends are used, if possible; each document gives its share of the requested tokens.
    """
    start_S1 = shards.segment_start_S1
    tokens_N = (start_S1[documents_N2[:, 1]] - start_S1[documents_N2[:, 0]]).astype(np.int64)
    order = np.argsort(uniform_N, kind="stable").tolist()
    middle_N = documents_N2[:, 1].copy()
    left = wanted

    def whole_documents(left: float) -> float:
        for number in order:
            if left <= 0:
                break
            if middle_N[number] == documents_N2[number, 1] and tokens_N[number] <= left:
                middle_N[number] = documents_N2[number, 0]
                left -= int(tokens_N[number])
        return left

    def ends(left: float) -> float:
        cut = [n for n in order if middle_N[n] == documents_N2[n, 1] and documents_N2[n, 1] - documents_N2[n, 0] > 1]
        share = left / max(1, int(tokens_N[cut].sum()))
        for number in cut:
            if left <= 0:
                break
            first, end = documents_N2[number].tolist()
            goal = int(start_S1[end]) - max(1, math.floor(share * int(tokens_N[number])))
            middle = int(np.searchsorted(start_S1[first : end + 1], goal, side="right")) - 1 + first
            middle_N[number] = min(max(middle, first + 1), end - 1)
            left -= int(start_S1[end] - start_S1[middle_N[number]])
        return left

    steps = (ends, whole_documents) if len(documents_N2) < _FEW_DOCUMENTS else (whole_documents, ends)
    for step in steps:
        left = step(left)
    if left == wanted and len(documents_N2) > 1:  # nothing fits: each document is one long segment
        middle_N[order[0]] = documents_N2[order[0], 0]
    return _cut(documents_N2, middle_N)


def _cut(documents_N2: Ranges, middle_N: Int64Array) -> tuple[Ranges, Ranges]:
    """The parts of each document before and from these segments, without empty parts."""
    parts = np.stack([documents_N2[:, 0], middle_N], axis=1), np.stack([middle_N, documents_N2[:, 1]], axis=1)
    training, held = (part[part[:, 0] < part[:, 1]] for part in parts)
    return training, held
