"""Token-document relation: which tokens also occur in other segments of their document?

Sun et al. 2019, ERNIE 2.0, arXiv:1907.12412, section 4.2.1: words that recur in a document are its key words or common
to all texts, and the model is trained to distinguish them from the rest. Sibling of capitalisation.py.

A segment is one of the corpus (`data.reading.segments`): a sentence, or a line. Labels are computed over the whole
document when a batch is made, even if the sample contains only a part, and from the text's own tokens, also at masks.
Not specified in the paper: the targets are all tokens that are not special, compared by id; subwords count separately.

Shapes: T packed tokens, M tokens that are not special, N tokens of one document, U different ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
from pydantic import PrivateAttr

from bertkit.arrays import BoolArray, Int64Array
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.objectives.base import Objective, TokenDetection
from bertkit.objectives.capitalisation import Capitalisation
from bertkit.text.tokenizer import Tokenizer


class TokenDocument(TokenDetection):
    """Binary classification of every token that is not special: whether another segment of its document has it."""

    term: ClassVar[str] = "token_document"
    outputs: ClassVar[int] = 1
    label_names: ClassVar[tuple[str, ...]] = ("here alone", "elsewhere")
    is_random: ClassVar[bool] = False
    rank: ClassVar[int] = Capitalisation.rank + 1

    _shards: TokenShards | None = PrivateAttr(None)

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        return [
            f"objective.{self.term} marks the tokens of the text, but objective.{each.term} moves them; leave one of"
            " the two out"
            for each in objectives
            if each.change == "moved"
        ]

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        prepared = self.model_copy()
        prepared._shards = shards
        return prepared

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Mark the tokens; no token changes."""
        shards = self._shards
        assert shards is not None, "prepared() gives the corpus"
        assert samples.source_T is not None, "layouts tell where tokens stand"
        index_M = np.flatnonzero(~samples.special_T)
        place_M = samples.source_T[index_M]
        document_M = shards.documents_of(place_M)
        marks_M = np.zeros(index_M.size, dtype=np.int64)
        for document in np.unique(document_M).tolist():
            start, end = shards.segment_start_S1[shards.document_start_D1[document : document + 2]].tolist()
            in_document_M = document_M == document
            marks_M[in_document_M] = recurring(shards, start, end)[place_M[in_document_M] - start]
        return samples.with_targets(self.term, Targets(index_M, marks_M))


def recurring(shards: TokenShards, start: int, end: int) -> BoolArray:
    """Whether each token of a document (the corpus's tokens from start to end) also occurs in another of its segments,
    (N,)."""
    _, kind_N = np.unique(shards.tokens_between(start, end), return_inverse=True)
    segment_N: Int64Array = np.searchsorted(shards.segment_start_S1, np.arange(start, end), side="right")
    # The number of distinct pairs of kind and segment is the number of segments of a kind.
    pairs = np.unique(np.stack([kind_N.ravel(), segment_N]), axis=1)
    segments_U = np.bincount(pairs[0])
    return np.asarray(segments_U[kind_N.ravel()] > 1)
