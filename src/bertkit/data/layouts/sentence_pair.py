"""Sentence pairs: two single sentences, whatever their length.

Liu et al. 2019, RoBERTa, arXiv:1907.11692, section 4.2, SENTENCE-PAIR: natural sentences, from a contiguous portion of
one document or from separate ones. Built on pairs.py; sibling of segment_pair.py, whose sides are runs of sentences.

A sample is far shorter than `data.sequence_length`. The paper raises the batch until it has about as many tokens as one
of segment pairs; here that is `optimisation.batch_sequences`.
"""

from __future__ import annotations

from typing import Literal

from bertkit.data.layouts.base import Plan, Ranges
from bertkit.data.layouts.pairs import PairLayout, PairPlanner, truncated
from bertkit.data.random import Draw
from bertkit.data.shards import TokenShards


class SentencePair(PairLayout):
    """RoBERTa's pairs of natural sentences: `[CLS] sentence [SEP] sentence [SEP]`."""

    name: Literal["sentence-pair"] = "sentence-pair"

    def plan(self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int) -> Plan:
        pairs = PairPlanner(self, shards.segment_start_S1, documents_N2, draw, epoch)
        for document in range(len(documents_N2)):
            pairs.plan_document(document, _TwoSentences())
        return truncated(pairs.rows, sequence_length - self.special_tokens, draw, epoch)


class _TwoSentences:
    """A chunk of two segments, or of the last one; a random partner is one segment."""

    def end(self, start_s1: list[int], segment: int) -> int:
        return min(segment + 2, len(start_s1) - 1)

    def partner_tokens(self, first_tokens: int) -> int:
        return 1
