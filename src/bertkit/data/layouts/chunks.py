"""Chunks of one document: [CLS] sentence sentence ... [SEP], BERT's samples without a second segment.

Izsak et al. 2021, 24-hour BERT, arXiv:2104.07705, as its released dataset/data/create_pretraining_data.py makes them
with --no_nsp. Unlike doc-sentences (sentences.py) a chunk ends with the sentence that reaches its target length, not
with the last that fits; a longer chunk loses tokens one at a time, front or back with equal chance; and one document
in ten has a shorter target, drawn uniformly.

Shapes: N documents, R planned chunks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from scipy.stats import binom

from bertkit.data.layouts.base import PART_ROWS, Plan, Ranges
from bertkit.data.layouts.sentences import Sentences, run_rows
from bertkit.data.random import Draw
from bertkit.data.shards import TokenShards


class SingleSegment(Sentences):
    """BERT's chunks, each a sample."""

    name: Literal["single-segment"] = "single-segment"
    short_sequence_probability: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Probability that a document is cut into shorter samples, of a target length drawn uniformly.",
    )

    epoch_dependent: ClassVar[bool] = True

    def plan_parts(
        self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int
    ) -> Iterator[Plan]:
        room = sequence_length - self.special_tokens
        number_N = np.arange(len(documents_N2))
        short_N = draw.uniform("single/short", epoch=epoch, sample=number_N) < self.short_sequence_probability
        drawn_N = 2 + draw.integers("single/target", room - 1, epoch=epoch, sample=number_N)
        target_N = np.where(short_N, drawn_N, room)
        rows, planned = array("Q"), 0
        for (low, high), target in zip(documents_N2.tolist(), target_N.tolist(), strict=True):
            edges = shards.segment_start_S1[low : high + 1].tolist()
            segment = 0
            while segment < high - low:
                end = min(bisect_left(edges, edges[segment] + target, lo=segment + 1), high - low)
                rows.extend((edges[segment], edges[end]))
                segment = end
            if len(rows) >= 2 * PART_ROWS:
                yield _truncated(rows, planned, room, draw, epoch)
                rows, planned = array("Q"), planned + len(rows) // 2
        yield _truncated(rows, planned, room, draw, epoch)


def _truncated(rows: array[int], first: int, room: int, draw: Draw, epoch: int) -> Plan:
    """Cut each chunk to `room` tokens; `first` is the number of the first one in the plan."""
    plan_R = run_rows(rows)
    excess_R = np.maximum((plan_R["end"] - plan_R["start"]).astype(np.int64) - room, 0)
    uniform_R = draw.uniform("single/cut", epoch=epoch, sample=first + np.arange(len(plan_R)))
    front_R = np.where(excess_R > 0, binom.ppf(uniform_R, np.maximum(excess_R, 1), 0.5), 0)
    front_R = np.maximum(front_R, 0).astype(np.uint64)
    plan_R["start"] += front_R
    plan_R["end"] -= excess_R.astype(np.uint64) - front_R
    return plan_R
