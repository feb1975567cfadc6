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

from bisect import bisect_right
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np

from bertkit.data.layouts.base import Address, Layout, Plan, Ranges
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards

RUN_ROW = np.dtype([("start", "<u8"), ("end", "<u8")])
"""A sample's range of tokens."""
_PART_BITS = 50
"""A document's number in its sample is added above this many bits, which hold the sample and its language."""


class Sentences(Layout):
    """Runs of text behind a classifier token, each document in one closed by a separator."""

    special_tokens: ClassVar[int] = 2
    epoch_dependent: ClassVar[bool] = False
    closes_samples: ClassVar[bool] = True
    """Whether a separator closes every sample, and not only the documents that end in it."""

    def assemble(self, shards: TokenShards, plan_B: Plan, vocabulary: Vocabulary, address: Address) -> Samples:
        document_token_N1 = shards.segment_start_S1[shards.document_start_D1]
        sequences: list[np.ndarray] = []
        marks: list[np.ndarray] = []
        sources: list[np.ndarray] = []
        nothing = np.zeros(1, dtype=np.uint8)
        nowhere = np.array([-1])
        for start, end in plan_B.tolist():
            low, high = np.searchsorted(document_token_N1, [start + 1, end])
            edges = [start, *document_token_N1[low:high].tolist(), end]
            is_closed = self.closes_samples or bool(document_token_N1[high] == end)
            pieces: list[np.ndarray] = [np.array([vocabulary.cls_id])]
            marks.append(nothing)
            sources.append(nowhere)
            for left, right in pairwise(edges):
                pieces.append(shards.tokens_between(left, right))
                sources.append(np.arange(left, right))
                marks += [shards.span_marks_between(left, right)] if shards.span_fields else []
                if right < end or is_closed:
                    pieces.append(np.array([vocabulary.sep_id]))
                    sources.append(nowhere)
                    marks += [nothing] if shards.span_fields else []
            sequences.append(np.concatenate(pieces))
        ids_T = np.concatenate(sequences).astype(np.int64)
        cu_seqlens_B1 = np.concatenate([[0], np.cumsum([sequence.size for sequence in sequences])])
        special_T = (ids_T == vocabulary.cls_id) | (ids_T == vocabulary.sep_id)
        return Samples(
            ids_T=ids_T,
            token_types_T=np.zeros_like(ids_T),
            special_T=special_T,
            cu_seqlens_B1=cu_seqlens_B1,
            epoch_B=address.epoch_B,
            sample_B=address.sample_B,
            spans_T=np.concatenate(marks) if shards.span_fields else None,
            source_T=np.concatenate(sources),
        )


class DocSentences(Sentences):
    """Runs that stop at the end of their document."""

    name: Literal["doc-sentences"] = "doc-sentences"

    def plan(self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int) -> Plan:
        room = sequence_length - self.special_tokens
        rows: list[tuple[int, int]] = []
        for low, high in documents_N2.tolist():
            rows += _fill(shards.segment_start_S1[low : high + 1].tolist(), room)
        return np.array(rows, dtype=RUN_ROW)


class FullSentences(Sentences):
    """Runs that continue into the next document, with a separator between the two."""

    name: Literal["full-sentences"] = "full-sentences"

    def plan(self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int) -> Plan:
        room = sequence_length - self.special_tokens
        rows: list[tuple[int, int]] = []
        for run in unbroken(documents_N2):
            # A separator costs one token: shifting every document by its number in the run makes room for it.
            starts, shifts = [], []
            for number, (low, high) in enumerate(run.tolist()):
                segment_starts = shards.segment_start_S1[low:high].tolist()
                starts += [start + number for start in segment_starts]
                shifts += [number] * len(segment_starts)
            starts.append(int(shards.segment_start_S1[run[-1, 1]]) + len(run) - 1)
            shifts.append(len(run) - 1)
            rows += _fill_shifted(starts, shifts, room)
        return np.array(rows, dtype=RUN_ROW)


class PackedDocuments(Sentences):
    """Samples filled with whole sentences of one document after the other, each document a sequence of its own: its
    tokens attend to it alone, and its positions are counted from 0. A batch has as many tokens as with full-sentences.

    Warner et al. 2024, ModernBERT, arXiv:2412.13663, section 2.2.1, where sequences of a buffer are packed by best fit.
    """

    name: Literal["packed-documents"] = "packed-documents"

    def plan(self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int) -> Plan:
        room = sequence_length - self.special_tokens
        rows: list[tuple[int, int]] = []
        for run in unbroken(documents_N2):
            # A further document costs special tokens of its own: shifting documents makes room for them.
            starts, ends, shifts = [], [], []
            for number, (low, high) in enumerate(run.tolist()):
                edges = shards.segment_start_S1[low : high + 1].tolist()
                shift = number * self.special_tokens
                starts += [edge + shift for edge in edges[:-1]]
                ends += [edge + shift for edge in edges[1:]]
                shifts += [shift] * (high - low)
            segment = 0
            while segment < len(starts):
                first = starts[segment] - shifts[segment]
                behind = bisect_right(ends, starts[segment] + room, lo=segment)
                last = max(behind, segment + 1) - 1
                stop = ends[last] - shifts[last]
                # A sentence that is longer than a sample is cut.
                step = stop - first if behind > segment else room
                rows += [(left, min(left + step, stop)) for left in range(first, stop, step)]
                segment = last + 1
        return np.array(rows, dtype=RUN_ROW)

    def assemble(self, shards: TokenShards, plan_B: Plan, vocabulary: Vocabulary, address: Address) -> Samples:
        """Each document in a sample is a sequence, addressed by the sample and its number in it."""
        document_token_N1 = shards.segment_start_S1[shards.document_start_D1]
        parts: list[tuple[int, int]] = []
        row_b: list[int] = []
        number_b: list[int] = []
        for row, (start, end) in enumerate(plan_B.tolist()):
            low, high = np.searchsorted(document_token_N1, [start + 1, end])
            edges = [start, *document_token_N1[low:high].tolist(), end]
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


def _fill(starts: list[int], room: int) -> list[tuple[int, int]]:
    """Token ranges of whole segments, each of at most `room` tokens; a longer segment is cut."""
    return _fill_shifted(starts, [0] * len(starts), room)


def _fill_shifted(starts: list[int], shifts: list[int], room: int) -> list[tuple[int, int]]:
    """The same over starts that were moved up by `shifts` to make room for separators; ranges are in tokens."""
    rows: list[tuple[int, int]] = []
    segment, last = 0, len(starts) - 1
    while segment < last:
        end = bisect_right(starts, starts[segment] + room, lo=segment) - 1
        if end > segment:
            # Room is measured in shifted positions, separators included; the range itself is in tokens.
            rows.append((starts[segment] - shifts[segment], starts[end] - shifts[end]))
            segment = end
            continue
        token, stop = starts[segment] - shifts[segment], starts[segment + 1] - shifts[segment + 1]
        rows += [(left, min(left + room, stop)) for left in range(token, stop, room)]
        segment += 1
    return rows
