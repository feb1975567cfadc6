"""`data.deduplicate`: documents that repeat an earlier one, or nearly do, are left out of a corpus.

Lee et al. 2022, "Deduplicating training data makes language models better", arXiv:2107.06499.

Shapes: D documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.arrays import BoolArray
from bertkit.data.duplicates import first_occurrences
from bertkit.data.near_duplicates import near_duplicates
from bertkit.data.shards import TokenShards


def kept_documents(shards: TokenShards, deduplicate: bool | float, cache: Path | None) -> BoolArray | None:
    """Whether `data.deduplicate` keeps each document, (D,); None if it keeps all; `cache` as for `in_cache`."""
    if deduplicate is False:
        return None
    first_D = first_occurrences(shards, cache)
    return first_D if deduplicate is True else first_D & ~near_duplicates(shards, deduplicate, cache)


@dataclass(frozen=True)
class LeftOut:
    """The documents that `data.deduplicate` leaves out of a corpus.

    Attributes:
        documents: how many.
        tokens: how many these have.
        share: of the corpus's tokens.
        similarity: to an earlier document from which one is left out; 1 for equal ones only.
    """

    documents: int
    tokens: int
    share: float
    similarity: float

    @classmethod
    def of(cls, shards: TokenShards, deduplicate: bool | float, cache: Path | None) -> LeftOut | None:
        """Those of a corpus, None if it keeps all; arguments as for `kept_documents`."""
        kept_D = kept_documents(shards, deduplicate, cache)
        if kept_D is None:
            return None
        tokens_D = np.diff(shards.segment_start_S1[shards.document_start_D1])
        tokens = int(tokens_D[~kept_D].sum())
        return cls(int((~kept_D).sum()), tokens, tokens / shards.tokens, float(deduplicate))

    @property
    def in_words(self) -> str:
        how = "repeat an earlier one" if self.similarity == 1 else f"are {self.similarity:g} similar to an earlier one"
        return f"{self.documents:,} documents, {self.share:.1%} of the text, {how} and are left out"

    @property
    def document(self) -> dict[str, Any]:
        """For results.json."""
        return dict(vars(self))
