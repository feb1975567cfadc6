"""Runs of whole sentences: [CLS] sentence sentence ... [SEP], as many as fit.

Liu et al. 2019, RoBERTa, arXiv:1907.11692, section 4.2. FULL-SENTENCES continues into the next document after a
separator; DOC-SENTENCES stops at the end of a document. Sibling of pairs.py, whose samples are two segments with a
label.

A sentence longer than a sample is split into samples of its own. The plan is the same in every epoch, as in the
released code: only the order and the masks change. PACKED-DOCUMENTS, ModernBERT's, fills samples like FULL-SENTENCES,
but in each of them documents do not see one another.

Shapes: N documents, R planned runs, B runs of a batch.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np

from bertkit.data.layouts.base import PART_ROWS, Address, Layout, Piece, Plan, Ranges, assembled
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards

RUN_ROW = np.dtype([("start", "<u8"), ("end", "<u8")])
"""A sample's range of tokens."""
_WINDOW = 1 << 20
"""Segments of a run that are in memory together, which bounds the memory whatever the size of the corpus."""
_PART_BITS = 50
"""A document's number in its sample is added above this many bits, which hold the sample and its language."""


class Sentences(Layout):
    """Runs of text behind a classifier token, each document in one closed by a separator."""

    special_tokens: ClassVar[int] = 2
    epoch_dependent: ClassVar[bool] = False

    @property
    def closes_samples(self) -> bool:
        """Whether a separator closes every sample, and not only the documents that end in it."""
        return True

    @property
    def closes_documents(self) -> bool:
        """Whether a separator closes every document in a sample."""
        return True

    def assemble(self, shards: TokenShards, plan_B: Plan, vocabulary: Vocabulary, address: Address) -> Samples:
        pieces_B: list[list[Piece]] = []
        for start, end in plan_B.tolist():
            starts = shards.document_starts(start + 1, end + 1).tolist() if self.closes_documents else []
            is_closed = self.closes_samples or end in starts
            pieces_B.append([vocabulary.cls_id])
            for left, right in pairwise([start, *(each for each in starts if each < end), end]):
                pieces_B[-1] += [(left, right), vocabulary.sep_id] if right < end or is_closed else [(left, right)]
        return assembled(shards, pieces_B, address)


class DocSentences(Sentences):
    """Runs that stop at the end of their document."""

    name: Literal["doc-sentences"] = "doc-sentences"

    def plan_parts(
        self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int
    ) -> Iterator[Plan]:
        room = sequence_length - self.special_tokens
        rows = array("Q")
        for low, high in documents_N2.tolist():
            start_s1 = shards.segment_start_S1[low : high + 1].tolist()
            _fill(rows, start_s1, partial(_reach, start_s1, room), room)
            if len(rows) >= 2 * PART_ROWS:
                yield run_rows(rows)
                rows = array("Q")
        yield run_rows(rows)


class FullSentences(Sentences):
    """Runs that continue into the next document, with a separator between the two."""

    name: Literal["full-sentences"] = "full-sentences"

    def plan_parts(
        self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int
    ) -> Iterator[Plan]:
        room = sequence_length - self.special_tokens
        for run in unbroken(documents_N2):
            yield from _filled_across(shards.segment_start_S1, run, room, between=1, before_next=True)


class PackedDocuments(Sentences):
    """Samples filled with whole sentences of one document after the other, each document a sequence of its own: its
    tokens attend to it alone, and its positions are counted from 0. A batch has as many tokens as with full-sentences.

    Warner et al. 2024, ModernBERT, arXiv:2412.13663, section 2.2.1, where sequences of a buffer are packed by best fit.
    """

    name: Literal["packed-documents"] = "packed-documents"

    def plan_parts(
        self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int
    ) -> Iterator[Plan]:
        room = sequence_length - self.special_tokens
        for run in unbroken(documents_N2):
            yield from _filled_across(
                shards.segment_start_S1, run, room, between=self.special_tokens, before_next=False
            )

    def assemble(self, shards: TokenShards, plan_B: Plan, vocabulary: Vocabulary, address: Address) -> Samples:
        """Each document in a sample is a sequence, addressed by the sample and its number in it."""
        parts: list[tuple[int, int]] = []
        row_b: list[int] = []
        number_b: list[int] = []
        for row, (start, end) in enumerate(plan_B.tolist()):
            edges = [start, *shards.document_starts(start + 1, end).tolist(), end]
            parts += pairwise(edges)
            row_b += [row] * (len(edges) - 1)
            number_b += range(len(edges) - 1)
        sample_b = address.sample_B[row_b] + (np.array(number_b, dtype=np.int64) << _PART_BITS)
        return super().assemble(
            shards, np.array(parts, dtype=RUN_ROW), vocabulary, Address(address.epoch_B[row_b], sample_b)
        )


def unbroken(documents_N2: Ranges) -> list[Ranges]:
    """Runs of adjacent documents of the corpus."""
    run_starts = np.flatnonzero(np.r_[True, documents_N2[1:, 0] != documents_N2[:-1, 1]])
    return np.split(documents_N2, run_starts[1:])


def run_rows(flat: array[int]) -> Plan:
    """Starts and ends in turn as rows; a flat array takes a tenth of the memory of a list of pairs."""
    return np.frombuffer(flat, dtype=RUN_ROW) if flat else np.empty(0, dtype=RUN_ROW)


def _filled_across(
    segment_start_S1: Ranges, run_N2: Ranges, room: int, *, between: int, before_next: bool
) -> Iterator[Plan]:
    """Token ranges of whole segments, each of at most `room` tokens, across the documents of a run.

    Args:
        segment_start_S1: the first token of each segment, and the end of the last one.
        run_N2: adjacent documents.
        room: of one range, in which every further document costs `between` tokens.
        between: separators and classifiers of a further document.
        before_next: whether a range that ends with a document costs them, too.
    """
    segment, high = int(run_N2[0, 0]), int(run_N2[-1, 1])
    while segment < high:
        stop = min(segment + max(_WINDOW, room + 1), high)  # more segments than a range can have
        token_W1 = segment_start_S1[segment : stop + 1].astype(np.int64)
        document_W1 = np.searchsorted(run_N2[:, 0], np.arange(segment, stop + 1), side="right") - 1
        # Moving every document by its number in the run makes room for what it costs.
        start_W1 = token_W1 + between * document_W1
        document_before_W1 = document_W1 if before_next else np.append(document_W1[:1], document_W1[:-1])
        end_W1 = token_W1 + between * document_before_W1
        reach_W = (np.searchsorted(end_W1, start_W1[:-1] + room, side="right") - 1).tolist()
        rows = array("Q")
        segment += _fill(rows, token_W1.tolist(), reach_W.__getitem__, room, is_last=stop == high)
        yield run_rows(rows)


def _reach(start_s1: list[int], room: int, segment: int) -> int:
    """The segment after the last of those that fit in a range that begins with this one."""
    return bisect_right(start_s1, start_s1[segment] + room, lo=segment) - 1


def _fill(
    rows: array[int], start_s1: list[int], reach: Callable[[int], int], room: int, *, is_last: bool = True
) -> int:
    """Append token ranges of whole segments; a segment that is longer than `room` is cut.

    Args:
        rows: receives starts and ends.
        start_s1: the first token of each segment, and the end of the last one.
        reach: from a segment to the one after the last that fits in a range with it; itself if it is too long.
        room: tokens of a range.
        is_last: whether no segments follow; if others follow, a range that reaches the end is left to them.

    Returns:
        The number of segments in the ranges.
    """
    segment, count = 0, len(start_s1) - 1
    while segment < count:
        end = reach(segment)
        if end >= count and not is_last and segment:
            break
        if end > segment:
            rows.extend((start_s1[segment], start_s1[end]))
            segment = end
            continue
        stop = start_s1[segment + 1]
        for left in range(start_s1[segment], stop, room):
            rows.extend((left, min(left + room, stop)))
        segment += 1
    return segment
