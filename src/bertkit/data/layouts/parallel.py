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

from bertkit.data.layouts.base import Address, Layout, Piece, Plan, Ranges, assembled
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
        cls_id, sep_id = vocabulary.cls_id, vocabulary.sep_id
        pieces_B: list[list[Piece]] = [
            [cls_id, (start, middle), sep_id, cls_id, (middle, end), sep_id] for start, middle, end in plan_B.tolist()
        ]
        decoder_start_B = (plan_B["middle"] - plan_B["start"]).astype(np.int64) + 2
        return assembled(shards, pieces_B, address).with_changes(decoder_start_B=decoder_start_B)
