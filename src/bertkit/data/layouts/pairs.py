"""Pairs: [CLS] A [SEP] B [SEP], where B follows A in its document, precedes it, or comes from another one.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1 and appendix A.2 (B follows or is random); Lan et al. 2020,
ALBERT, arXiv:1909.11942, section 3.1 (B follows or precedes); Wang et al. 2019, StructBERT, arXiv:1908.04577, section 2
(all three). The rules are those of BERT's and ALBERT's released create_pretraining_data.py. `SegmentPair` is BERT's
layout, and SEGMENT-PAIR of Liu et al. 2019, RoBERTa, arXiv:1907.11692, section 4.2; `SentencePair` is RoBERTa's
SENTENCE-PAIR.

Quirks kept: segments that a random partner replaced are used again; the random document is drawn again, up to ten
times, if it is the same one; a pair that is too long loses tokens of its longer side, front or back with equal chance;
a document draws its target length once, short with probability 0.1. In BERT's and ALBERT's code a chunk of a single
segment always has a random partner, so that more than half of the pairs have label 1, and a few of ALBERT's negatives
are random instead of swapped: `lone_segment: random` is that rule. With `lone_segment: cut` partners are random only by
a draw, and the shares are those of the settings.

Shapes: N documents, R planned pairs, B pairs of a batch.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from scipy.stats import binom

from bertkit.arrays import Float64Array, Int64Array
from bertkit.data.layouts.base import PART_ROWS, Address, Layout, Piece, Plan, Ranges, assembled
from bertkit.data.layouts.compiled_pairs import NUMBERS, listed_pairs, pairs_library
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.settings import UnreadKey

_ROW = np.dtype(
    [
        ("first_start", "<u8"),
        ("second_start", "<u8"),
        ("first_length", "<u4"),
        ("second_length", "<u4"),
        ("random", "u1"),
        ("swapped", "u1"),
    ]
)
COMPILED_SEGMENTS = 1_000_000
"""Texts of as many segments are walked by the compiled loop: Python's takes a second for them."""
_PARTNER_TRIES = 10
_PURPOSE = "pair/choice"
_DOCUMENT_DRAW = 3
_DRAWS = np.array([0, 1, 2, _DOCUMENT_DRAW, _DOCUMENT_DRAW + _PARTNER_TRIES])
"""Positions of a chunk's draws: of its split, of a random partner, of its first segment and document, and of a swap."""
_DRAWS_AHEAD = 4096


class Relation(IntEnum):
    """The relation of the second segment to the first: the classes of sentence_structure."""

    NEXT = 0
    PREVIOUS = 1
    RANDOM = 2


class PairLayout(Layout):
    """Pairs with a label for each objective on the relation of their segments."""

    name: str
    random_partner_probability: float = Field(
        0.5, ge=0, le=1, description="Probability that the second segment comes from another document."
    )
    swap_probability: float = Field(
        0.0, ge=0, le=1, description="Probability that two consecutive segments are swapped."
    )
    lone_segment: Literal["random", "cut"] = Field(
        "random",
        description="What becomes of a single leftover segment. random: it is paired with a random partner, as in"
        " the released code of BERT and ALBERT; cut: unless a random partner is drawn for it, it is cut at a random"
        " token into two consecutive segments.",
    )

    special_tokens: ClassVar[int] = 3
    labels: ClassVar[tuple[str, ...]] = ("next_sentence", "sentence_order", "sentence_structure")
    epoch_dependent: ClassVar[bool] = True

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.random_partner_probability == 1:
            why = "data.layout.random_partner_probability is 1: no pair has two consecutive segments"
            yield UnreadKey("swap_probability", why)
            yield UnreadKey("lone_segment", why)

    @property
    def shares(self) -> dict[Relation, float]:
        """The share of each relation; random partners of lone segments come on top."""
        random, swapped = self.random_partner_probability, self.swap_probability
        return {
            Relation.NEXT: (1 - random) * (1 - swapped),
            Relation.PREVIOUS: (1 - random) * swapped,
            Relation.RANDOM: random,
        }

    def assemble(self, shards: TokenShards, plan_B: Plan, vocabulary: Vocabulary, address: Address) -> Samples:
        cls_id, sep_id = vocabulary.cls_id, vocabulary.sep_id
        pieces_B: list[list[Piece]] = [
            [cls_id, (first, first + first_length), sep_id, (second, second + second_length), sep_id]
            for first, second, first_length, second_length, *_ in plan_B.tolist()
        ]
        segments_B2 = np.stack([plan_B["first_length"] + 2, plan_B["second_length"] + 1], axis=1)
        return assembled(shards, pieces_B, address).with_changes(
            token_types_T=np.repeat(np.tile([0, 1], len(plan_B)), segments_B2.ravel()), labels=_labels(plan_B)
        )


def _labels(plan_B: Plan) -> dict[str, Int64Array]:
    """By objective. The binary ones have the same label: whether the second segment does not follow the first."""
    one_document_B = np.where(plan_B["swapped"], Relation.PREVIOUS, Relation.NEXT)
    relation_B = np.where(plan_B["random"], Relation.RANDOM, one_document_B).astype(np.int64)
    not_next_B = (relation_B != Relation.NEXT).astype(np.int64)
    return {"next_sentence": not_next_B, "sentence_order": not_next_B, "sentence_structure": relation_B}


class PairPlanner:
    """Walks documents and collects pairs, before truncation, as what `truncated` takes.

    Args:
        target_N: a chunk of a document ends with the segment with which it has this many tokens, and so does a random
            partner; None: a chunk has two segments, and a random partner one.
    """

    def __init__(
        self,
        layout: PairLayout,
        segment_start_S1: Ranges,
        documents_N2: Ranges,
        target_N: Int64Array | None,
        draw: Draw,
        epoch: int,
    ) -> None:
        self.layout = layout
        self.segment_start_S1 = segment_start_S1
        self.documents_N2 = documents_N2
        self.target_N = target_N
        self.draw = draw
        self.epoch = epoch
        self._rows = array("q")
        self._chunks = 0
        self._drawn: list[list[float]] = []

    def parts(self, maximum: int) -> Iterator[Plan]:
        """The pairs of all documents, of at most `maximum` tokens."""
        planned = 0
        for rows_R6 in self._rows_in_parts():
            yield truncated(rows_R6, planned, maximum, self.draw, self.epoch)
            planned += len(rows_R6)

    def _rows_in_parts(self) -> Iterator[Int64Array]:
        """The numbers of each pair, as `truncated` takes them."""
        segments = int((self.documents_N2[:, 1] - self.documents_N2[:, 0]).sum())
        if segments >= COMPILED_SEGMENTS and (library := pairs_library()) is not None:
            yield from listed_pairs(
                library,
                *(self.segment_start_S1, self.documents_N2, self.target_N),
                draws=self._draws,
                other_document=self._document_drawn_again,
                random_partner_probability=self.layout.random_partner_probability,
                swap_probability=self.layout.swap_probability,
                pairs_lone_segments=self.layout.lone_segment == "random",
            )
            return
        for document in range(len(self.documents_N2)):
            self.plan_document(document)
            if len(self._rows) >= PART_ROWS * NUMBERS:
                yield self._taken_rows()
        yield self._taken_rows()

    def _taken_rows(self) -> Int64Array:
        rows, self._rows = self._rows, array("q")
        return np.array(rows, dtype=np.int64).reshape(-1, NUMBERS)

    def plan_document(self, document: int) -> None:
        low, high = self.documents_N2[document].tolist()
        start_s1 = self.segment_start_S1[low : high + 1].tolist()
        target = None if self.target_N is None else int(self.target_N[document])
        count, segment = high - low, 0
        while segment < count:
            if target is None:
                chunk_end = min(segment + 2, count)
            else:
                chunk_end = min(bisect_left(start_s1, start_s1[segment] + target, lo=segment + 1), count)
            number = self._chunks
            split_draw, random_draw, start_draw, document_draw, swap_draw = self._next_draws()
            start, end = start_s1[segment], start_s1[chunk_end]
            lone = chunk_end - segment == 1
            first_end = segment + 1 if lone else segment + 1 + int(split_draw * (chunk_end - segment - 1))
            if random_draw < self.layout.random_partner_probability or (lone and self.layout.lone_segment == "random"):
                tokens = 1 if target is None else target - (start_s1[first_end] - start)
                partner = int(document_draw * len(self.documents_N2))
                if partner == document:
                    partner = self._document_drawn_again(number, document)
                second = self._run_of_segments(partner, tokens, start_draw)
                self._rows.extend((start, start_s1[first_end], *second, 1, 0))
                segment = first_end
                continue
            segment = chunk_end
            middle = start + 1 + int(split_draw * (end - start - 1)) if lone else start_s1[first_end]
            if middle == end:  # a lone segment of one token, which cannot be cut
                continue
            if swap_draw < self.layout.swap_probability:
                self._rows.extend((middle, end, start, middle, 0, 1))
            else:
                self._rows.extend((start, middle, middle, end, 0, 0))

    def _document_drawn_again(self, chunk: int, document: int) -> int:
        """A random document instead of this one, unless nine more draws all are this one."""
        count = len(self.documents_N2)
        position = _DOCUMENT_DRAW + np.arange(1, _PARTNER_TRIES)
        again = self.draw.uniform(_PURPOSE, epoch=self.epoch, sample=chunk, position=position)
        others = (other for each in again.tolist() if (other := int(each * count)) != document)
        return next(others, document)

    def _run_of_segments(self, document: int, tokens: int, uniform: float) -> tuple[int, int]:
        """A run of a document's segments from a random one on, up to the one with which it has this many tokens."""
        low, high = self.documents_N2[document].tolist()
        start = low + int(uniform * (high - low))
        first_token = int(self.segment_start_S1[start])
        end = min(bisect_left(self.segment_start_S1, first_token + tokens, lo=start + 1, hi=high), high)
        return first_token, int(self.segment_start_S1[end])

    def _next_draws(self) -> list[float]:
        """The draws of one chunk, at `_DRAWS`; made for many chunks at once."""
        number = self._chunks
        self._chunks += 1
        if number % _DRAWS_AHEAD == 0:
            self._drawn = self._draws(number, _DRAWS_AHEAD).tolist()
        return self._drawn[number % _DRAWS_AHEAD]

    def _draws(self, first: int, count: int) -> Float64Array:
        """The draws of some chunks, at `_DRAWS`."""
        sample = np.arange(first, first + count)[:, None]
        return self.draw.uniform(_PURPOSE, epoch=self.epoch, sample=sample, position=_DRAWS)


def truncated(rows_R6: Int64Array, first: int, maximum: int, draw: Draw, epoch: int) -> Plan:
    """Cut each pair to `maximum` tokens, one at a time from its longer side (the second of two equals).

    Each cut token goes from the front or the back with equal chance, so the number cut in front is binomial. The
    numbers of each pair are: first start, first end, second start, second end, random, swapped. `first` is
    the number of the first pair in the plan.
    """
    first_R, second_R = rows_R6[:, 1] - rows_R6[:, 0], rows_R6[:, 3] - rows_R6[:, 2]
    excess_R = np.maximum(first_R + second_R - maximum, 0)
    difference_R = np.minimum(np.abs(first_R - second_R), excess_R)
    shared_R = excess_R - difference_R
    first_cut_R = np.where(first_R > second_R, difference_R, 0) + shared_R // 2
    second_cut_R = excess_R - first_cut_R
    plan_R = np.empty(len(rows_R6), dtype=_ROW)
    number_R = first + np.arange(len(rows_R6))
    sides = (("first", 0, first_R, first_cut_R), ("second", 2, second_R, second_cut_R))
    for side, column, length_R, cut_R in sides:
        is_cut_R = cut_R > 0
        uniform = draw.uniform(f"pair/cut-{side}", epoch=epoch, sample=number_R[is_cut_R])
        front_R = np.zeros_like(cut_R)
        front_R[is_cut_R] = np.maximum(binom.ppf(uniform, cut_R[is_cut_R], 0.5), 0)
        plan_R[f"{side}_start"] = rows_R6[:, column] + front_R
        plan_R[f"{side}_length"] = length_R - cut_R
    plan_R["random"], plan_R["swapped"] = rows_R6[:, 4], rows_R6[:, 5]
    return plan_R


class SegmentPair(PairLayout):
    """BERT's pairs of segments: `[CLS] sentence sentence [SEP] sentence sentence sentence [SEP]`."""

    name: Literal["segment-pair"] = "segment-pair"
    short_sequence_probability: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Probability that a document is cut into shorter pairs, of a target length drawn uniformly.",
    )

    def plan_parts(
        self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int
    ) -> Iterator[Plan]:
        maximum = sequence_length - self.special_tokens
        number_N = np.arange(len(documents_N2))
        short_N = draw.uniform("pair/short", epoch=epoch, sample=number_N) < self.short_sequence_probability
        drawn_N = 2 + draw.integers("pair/target", maximum - 1, epoch=epoch, sample=number_N)
        target_N = np.where(short_N, drawn_N, maximum)
        return PairPlanner(self, shards.segment_start_S1, documents_N2, target_N, draw, epoch).parts(maximum)


class SentencePair(PairLayout):
    """RoBERTa's pairs of natural sentences: `[CLS] sentence [SEP] sentence [SEP]`.

    A sample is far shorter than `data.sequence_length`. The paper raises the batch until it has about as many tokens as
    one of segment pairs; here that is `optimisation.batch_sequences`.
    """

    name: Literal["sentence-pair"] = "sentence-pair"

    def plan_parts(
        self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int
    ) -> Iterator[Plan]:
        planner = PairPlanner(self, shards.segment_start_S1, documents_N2, None, draw, epoch)
        return planner.parts(sequence_length - self.special_tokens)
