"""Pairs of a source and its target, for encoder-decoders: [CLS] source [SEP], then [CLS] target [SEP].

Vaswani et al. 2017, arXiv:1706.03762, section 5.1. A document of the corpus is a pair (text/parallel.py), and a
pair is one sample, never cut: one that is too long is left out, as in tensor2tensor and fairseq. Sibling pairs.py makes
pairs of running text.

Quirk left: the released code sorts pairs by length, so that little of a batch is padding; batches here have none.

Shapes: N documents, R planned pairs, B pairs of a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np

from bertkit.data.layouts.base import Address, Layout, Plan, Ranges
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.errors import DataError

log = logging.getLogger(__name__)

_ROW = np.dtype([("start", "<u8"), ("middle", "<u8"), ("end", "<u8")])


class ParallelText(Layout):
    """Whole pairs."""

    name: Literal["parallel"] = "parallel"

    special_tokens: ClassVar[int] = 4
    epoch_dependent: ClassVar[bool] = False
    keeps_documents: ClassVar[bool] = True

    def errors(self, data: Any, optimisation: Any) -> Iterator[str]:
        if data.languages:
            yield "data.languages: layout parallel reads data.sources alone; leave languages out"
        if data.reading.target_field is None and not data.is_tokenised:
            yield "data.layout parallel needs parallel text; write data.reading.target_field (target, as a rule)"

    def plan_parts(
        self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int
    ) -> Iterator[Plan]:
        unpaired_N = documents_N2[:, 1] - documents_N2[:, 0] != 2
        if unpaired_N.any():
            first = int(documents_N2[np.flatnonzero(unpaired_N)[0], 0])
            number = int(np.searchsorted(shards.document_start_D1, first, side="right")) - 1
            raise DataError(
                f"{shards.name}: {int(unpaired_N.sum()):,} documents are no pairs, such as number {number + 1}: a"
                " side has no token of the vocabulary, or the text was not read as parallel text"
                " (data.reading.target_field)"
            )
        start_S1 = shards.segment_start_S1
        plan_R = np.empty(len(documents_N2), dtype=_ROW)
        for place, name in enumerate(("start", "middle", "end")):
            plan_R[name] = start_S1[documents_N2[:, 0] + place]
        fits_R = (plan_R["end"] - plan_R["start"]).astype(np.int64) + self.special_tokens <= sequence_length
        if not fits_R.all():
            log.warning(
                "%s of %s pairs have more than %d tokens together (data.sequence_length), and are left out",
                *(f"{int((~fits_R).sum()):,}", f"{fits_R.size:,}", sequence_length),
            )
        yield plan_R[fits_R]

    def assemble(self, shards: TokenShards, plan_B: Plan, vocabulary: Vocabulary, address: Address) -> Samples:
        start_B, middle_B, end_B = (plan_B[name].astype(np.int64) for name in ("start", "middle", "end"))
        decoder_start_B = middle_B - start_B + 2
        cu_seqlens_B1 = np.concatenate([[0], np.cumsum(end_B - start_B + self.special_tokens)])
        ids_T = np.empty(int(cu_seqlens_B1[-1]), dtype=np.int64)
        source_T = np.full_like(ids_T, -1)
        special_T = np.zeros(ids_T.size, dtype=np.bool_)
        first_B, behind_B = cu_seqlens_B1[:-1], cu_seqlens_B1[1:]
        second_B = first_B + decoder_start_B
        for at_B, token in (
            (first_B, vocabulary.cls_id),
            (second_B - 1, vocabulary.sep_id),
            (second_B, vocabulary.cls_id),
            (behind_B - 1, vocabulary.sep_id),
        ):
            ids_T[at_B], special_T[at_B] = token, True
        for row in range(len(plan_B)):
            sides = ((first_B[row], start_B[row], middle_B[row]), (second_B[row], middle_B[row], end_B[row]))
            for at, left, right in sides:
                ids_T[at + 1 : at + 1 + right - left] = shards.tokens_between(int(left), int(right))
                source_T[at + 1 : at + 1 + right - left] = np.arange(left, right)
        return Samples(
            ids_T=ids_T,
            token_types_T=np.zeros_like(ids_T),
            special_T=special_T,
            cu_seqlens_B1=cu_seqlens_B1,
            epoch_B=address.epoch_B,
            sample_B=address.sample_B,
            source_T=source_T,
            decoder_start_B=decoder_start_B,
        )
