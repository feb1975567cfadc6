"""Segment pairs: [CLS] A [SEP] B [SEP], where B follows A in its document or comes from another one.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1 and appendix A.2; the rules are those of the released
create_pretraining_data.py. Sibling of sentences.py, whose samples are single runs of text.

Quirks honoured: a document draws its target length once, short with probability 0.1; a chunk of a single segment is
always given a random partner, so that more than half of the pairs are random; segments that a random partner
displaced go back into the text; a pair that is too long loses tokens of its longer side, front or back with equal
chance.

Shapes: N documents, R planned pairs, B pairs asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.stats import binom

from bertkit.data.layouts.base import Address, Layout, Plan, Ranges
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards

_ROW = np.dtype(
    [
        ("first_start", "<u8"),
        ("second_start", "<u8"),
        ("first_length", "<u4"),
        ("second_length", "<u4"),
        ("random", "u1"),
    ]
)
_PARTNER_TRIES = 10
_DRAWS_AHEAD = 4096


class SegmentPair(Layout):
    """BERT's pairs of segments, with a label that says whether the second really follows the first."""

    name: Literal["segment-pair"] = "segment-pair"
    short_sequence_probability: float = Field(
        0.1, ge=0, le=1, description="Chance that a document aims at shorter pairs, of a length drawn uniformly."
    )
    random_partner_probability: float = Field(
        0.5, ge=0, le=1, description="Chance that the second segment comes from another document."
    )

    special_tokens: ClassVar[int] = 3
    labels: ClassVar[tuple[str, ...]] = ("next_sentence",)
    epoch_dependent: ClassVar[bool] = True

    def plan(self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int) -> Plan:
        maximum = sequence_length - self.special_tokens
        number_N = np.arange(len(documents_N2))
        short_N = draw.uniform("pair/short", epoch=epoch, sample=number_N) < self.short_sequence_probability
        drawn_N = 2 + draw.integers("pair/target", maximum - 1, epoch=epoch, sample=number_N)
        target_N = np.where(short_N, drawn_N, maximum)
        pairs = _PairPlanner(self, shards.segment_start_S1, documents_N2, draw, epoch)
        for document, target in enumerate(target_N.tolist()):
            pairs.plan_document(document, target)
        return _truncate(np.array(pairs.rows, dtype=np.int64).reshape(-1, 5), maximum, draw, epoch)

    def assemble(self, shards: TokenShards, plan_B: Plan, vocabulary: Vocabulary, address: Address) -> Samples:
        lengths_B = plan_B["first_length"].astype(np.int64) + plan_B["second_length"] + self.special_tokens
        cu_seqlens_B1 = np.concatenate([[0], np.cumsum(lengths_B)])
        ids_T = np.empty(int(cu_seqlens_B1[-1]), dtype=np.int64)
        token_types_T = np.zeros_like(ids_T)
        for start, row in zip(cu_seqlens_B1.tolist(), plan_B.tolist(), strict=False):
            first_start, second_start, first_length, second_length, _ = row
            middle = start + 1 + first_length
            end = middle + 1 + second_length
            ids_T[start + 1 : middle] = shards.tokens_between(first_start, first_start + first_length)
            ids_T[middle + 1 : end] = shards.tokens_between(second_start, second_start + second_length)
            token_types_T[middle + 1 : end + 1] = 1
        starts_B, ends_B = cu_seqlens_B1[:-1], cu_seqlens_B1[1:]
        separators_B = starts_B + 1 + plan_B["first_length"]
        special_T = np.zeros(ids_T.size, dtype=np.bool_)
        special_T[starts_B] = special_T[separators_B] = special_T[ends_B - 1] = True
        ids_T[starts_B] = vocabulary.cls_id
        ids_T[separators_B] = ids_T[ends_B - 1] = vocabulary.sep_id
        return Samples(
            ids_T=ids_T,
            token_types_T=token_types_T,
            special_T=special_T,
            cu_seqlens_B1=cu_seqlens_B1,
            epoch_B=address.epoch_B,
            sample_B=address.sample_B,
            labels={"next_sentence": plan_B["random"].astype(np.int64)},
        )


class _PairPlanner:
    """Walks documents and collects pairs, before truncation: [first start, first end, second start, second end,
    random]."""

    def __init__(
        self, layout: SegmentPair, segment_start_S1: Ranges, documents_N2: Ranges, draw: Draw, epoch: int
    ) -> None:
        self.layout = layout
        self.segment_start_S1 = segment_start_S1
        self.documents_N2 = documents_N2
        self.draw = draw
        self.epoch = epoch
        self.rows: list[tuple[int, int, int, int, int]] = []
        self._drawn: list[list[float]] = []

    def plan_document(self, document: int, target: int) -> None:
        low, high = self.documents_N2[document].tolist()
        start_s1 = self.segment_start_S1[low : high + 1].tolist()
        count, segment = high - low, 0
        while segment < count:
            # The chunk runs up to the segment with which it reaches the target, or to the end of the document.
            chunk_end = min(bisect_left(start_s1, start_s1[segment] + target, lo=segment + 1), count)
            split_draw, random_draw, partner_start_draw, *partner_draws = self._next_draws()
            single = chunk_end - segment == 1
            first_end = segment + 1 if single else segment + 1 + int(split_draw * (chunk_end - segment - 1))
            if single or random_draw < self.layout.random_partner_probability:
                second = self._random_partner(
                    document, target - (start_s1[first_end] - start_s1[segment]), partner_draws, partner_start_draw
                )
                self.rows.append((start_s1[segment], start_s1[first_end], *second, 1))
                segment = first_end
            else:
                self.rows.append((start_s1[segment], start_s1[first_end], start_s1[first_end], start_s1[chunk_end], 0))
                segment = chunk_end

    def _random_partner(
        self, document: int, target: int, partner_draws: list[float], start_draw: float
    ) -> tuple[int, int]:
        """A run of segments from another document, up to the one with which it reaches the target."""
        partner = document
        for uniform in partner_draws:
            partner = int(uniform * len(self.documents_N2))
            if partner != document:
                break
        low, high = self.documents_N2[partner].tolist()
        start = low + int(start_draw * (high - low))
        first_token = int(self.segment_start_S1[start])
        end = min(bisect_left(self.segment_start_S1, first_token + target, lo=start + 1, hi=high), high)
        return first_token, int(self.segment_start_S1[end])

    def _next_draws(self) -> list[float]:
        number = len(self.rows)
        if number % _DRAWS_AHEAD == 0:
            sample = np.arange(number, number + _DRAWS_AHEAD)[:, None]
            position = np.arange(3 + _PARTNER_TRIES)
            self._drawn = self.draw.uniform("pair/choice", epoch=self.epoch, sample=sample, position=position).tolist()
        return self._drawn[number % _DRAWS_AHEAD]


def _truncate(rows_R5: NDArray[np.int64], maximum: int, draw: Draw, epoch: int) -> Plan:
    """Cut each pair to `maximum` tokens, one at a time from its longer side (the second of two equals).

    Each cut token goes from the front or the back with equal chance, so the number cut in front is binomial.
    """
    first_R, second_R = rows_R5[:, 1] - rows_R5[:, 0], rows_R5[:, 3] - rows_R5[:, 2]
    excess_R = np.maximum(first_R + second_R - maximum, 0)
    difference_R = np.minimum(np.abs(first_R - second_R), excess_R)
    shared_R = excess_R - difference_R
    first_cut_R = np.where(first_R > second_R, difference_R, 0) + shared_R // 2
    second_cut_R = excess_R - first_cut_R
    plan_R = np.empty(len(rows_R5), dtype=_ROW)
    number_R = np.arange(len(rows_R5))
    sides = (("first", 0, first_R, first_cut_R), ("second", 2, second_R, second_cut_R))
    for side, column, length_R, cut_R in sides:
        uniform_R = draw.uniform(f"pair/cut-{side}", epoch=epoch, sample=number_R)
        front_R = np.where(cut_R > 0, binom.ppf(uniform_R, np.maximum(cut_R, 1), 0.5), 0).astype(np.int64)
        plan_R[f"{side}_start"] = rows_R5[:, column] + np.maximum(front_R, 0)
        plan_R[f"{side}_length"] = length_R - cut_R
    plan_R["random"] = rows_R5[:, 4]
    return plan_R
