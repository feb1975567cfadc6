"""Capitalisation: which words of a lowercased text began with a capital letter?

Sun et al. 2019, ERNIE 2.0, arXiv:1907.12412, section 4.2.1 (capitalization prediction): a model that reads lowercased
text is trained on the case information that a cased model sees. The case of the corpus is stored with the tokens as
marks (`data.reading.mark_capitals`, text/annotated.py), so masked words have a label too. Sibling of token_document.py.

Not specified in the paper: the targets are all tokens that are not special, including a word's later subwords; a word
is capitalised if its first letter is a capital. No token of a word that a sample cuts counts as capitalised. With a
cased tokenizer the answer is in the input.

Shapes: T packed tokens, M tokens that are not special.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
from pydantic import PrivateAttr

from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.objectives.base import Objective, TokenDetection
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking.annotated import layout_errors
from bertkit.text.annotated import CAPITALS, INSIDE
from bertkit.text.tokenizer import Tokenizer

_REMEDY = "set data.reading.mark_capitals to true"


class Capitalisation(TokenDetection):
    """Binary classification of every token that is not special: whether its word is capitalised in the text."""

    term: ClassVar[str] = "capitalisation"
    outputs: ClassVar[int] = 1
    label_names: ClassVar[tuple[str, ...]] = ("lower", "capital")
    is_random: ClassVar[bool] = False
    rank: ClassVar[int] = MaskedLM.rank + 3
    """After all objectives that choose tokens; it changes none."""

    reads_capitals: ClassVar[bool] = True

    _number: int | None = PrivateAttr(None)

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        marked = data.reading.mark_capitals or data.is_tokenised
        found = [] if marked else [f"objective.{self.term} needs the case of the text; {_REMEDY}"]
        return found + layout_errors(f"objective.{self.term}", data)

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        return [
            f"objective.{self.term} marks the words of the text, but objective.{each.term} moves them; leave one of"
            " the two out"
            for each in objectives
            if each.change == "moved"
        ]

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        if CAPITALS not in shards.span_fields:
            raise UsageError(
                f"objective.{self.term}: {shards.directory} does not contain the case of its text; {_REMEDY}"
            )
        prepared = self.model_copy()
        prepared._number = shards.span_fields.index(CAPITALS)
        return prepared

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Mark the words; no token changes."""
        assert self._number is not None, "prepared() finds the field"
        assert samples.spans_T is not None, "layouts give the marks of shards that have some"
        index_M = np.flatnonzero(~samples.special_T)
        capital_M = (samples.spans_T[index_M] >> 2 * self._number) & INSIDE > 0
        return samples.with_targets(self.term, Targets(index_M, capital_M.astype(np.int64)))
