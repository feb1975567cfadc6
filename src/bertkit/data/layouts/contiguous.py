"""The corpus cut into samples of one length, as it runs: no sentence, and no document, decides where a sample ends.

Radford et al. 2018, GPT (no arXiv id), section 4.1, "randomly sampled, contiguous sequences of 512 tokens"; Radford et
al. 2019, GPT-2, section 2.3. Sibling of full-sentences in sentences.py, whose samples hold whole sentences and are
shorter: here a sample begins and ends anywhere, and a separator closes a document, never a sample; or, as in the
released prepare_data.py of He et al. 2021, DeBERTa, arXiv:2006.03654, a sample and never a document.

Shapes: N documents, R planned samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from bertkit.data.layouts.base import Plan, Ranges
from bertkit.data.layouts.sentences import RUN_ROW, Sentences, unbroken
from bertkit.data.random import Draw
from bertkit.data.shards import TokenShards


class Contiguous(Sentences):
    """Samples of contiguous tokens, across the ends of documents."""

    name: Literal["contiguous"] = "contiguous"
    separators: Literal["documents", "samples"] = Field(
        "documents", description="What a separator closes: documents, or samples, in which documents then just follow."
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"separators"})

    @property
    def closes_samples(self) -> bool:
        return self.separators == "samples"

    @property
    def closes_documents(self) -> bool:
        return self.separators == "documents"

    def plan_parts(
        self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int
    ) -> Iterator[Plan]:
        # Without separators of samples, the last place is for one of a document that ends there.
        room = sequence_length - self.special_tokens
        for run in unbroken(documents_N2):
            start_N = shards.segment_start_S1[run[:, 0]].astype(np.int64)
            end_N = shards.segment_start_S1[run[:, 1]].astype(np.int64)
            # Places in the run, in which every document has one more if a separator follows it.
            place_N = start_N - start_N[0] + self.closes_documents * np.arange(len(run))
            total = int(end_N[-1] - start_N[0]) + self.closes_documents * (len(run) - 1)
            edge_R = np.append(np.arange(0, total, room), total)
            document_R = np.searchsorted(place_N, edge_R, side="right") - 1
            token_R = np.minimum(start_N[document_R] + edge_R - place_N[document_R], end_N[document_R])
            plan_R = np.empty(len(token_R) - 1, dtype=RUN_ROW)
            plan_R["start"], plan_R["end"] = token_R[:-1], token_R[1:]
            yield plan_R[plan_R["end"] > plan_R["start"]]
