"""Segment pairs: two runs of sentences that together fill a sample.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1 and appendix A.2; in Liu et al. 2019, RoBERTa, arXiv:1907.11692,
section 4.2, this is SEGMENT-PAIR. Lan et al. 2020, ALBERT, arXiv:1909.11942, has the same segments, swapped or not.
Built on pairs.py; sibling of sentence_pair.py, whose two sides are single sentences.

Quirk honoured: a document draws its target length once, short with probability 0.1.

Shapes: N documents.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from bertkit.data.layouts.base import Plan, Ranges
from bertkit.data.layouts.pairs import PairLayout, PairPlanner, truncated
from bertkit.data.random import Draw
from bertkit.data.shards import TokenShards


class SegmentPair(PairLayout):
    """BERT's pairs of segments: `[CLS] sentence sentence [SEP] sentence sentence sentence [SEP]`."""

    name: Literal["segment-pair"] = "segment-pair"
    short_sequence_probability: float = Field(
        0.1, ge=0, le=1, description="Chance that a document aims at shorter pairs, of a length drawn uniformly."
    )

    def plan(self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int) -> Plan:
        maximum = sequence_length - self.special_tokens
        number_N = np.arange(len(documents_N2))
        short_N = draw.uniform("pair/short", epoch=epoch, sample=number_N) < self.short_sequence_probability
        drawn_N = 2 + draw.integers("pair/target", maximum - 1, epoch=epoch, sample=number_N)
        target_N = np.where(short_N, drawn_N, maximum)
        pairs = PairPlanner(self, shards.segment_start_S1, documents_N2, draw, epoch)
        for document, target in enumerate(target_N.tolist()):
            pairs.plan_document(document, _UpTo(target))
        return truncated(pairs.rows, maximum, draw, epoch)


@dataclass(frozen=True)
class _UpTo:
    """A chunk up to the segment with which it reaches a number of tokens, or to the end of the document."""

    target: int

    def end(self, start_s1: list[int], segment: int) -> int:
        return min(bisect_left(start_s1, start_s1[segment] + self.target, lo=segment + 1), len(start_s1) - 1)

    def partner_tokens(self, first_tokens: int) -> int:
        return self.target - first_tokens
