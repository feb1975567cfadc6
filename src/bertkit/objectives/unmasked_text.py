"""Base of the objectives that predict the text as it was before the masked LM hid some of its tokens.

They are trained beside a masked LM, which trains the encoder and the head that they use. Siblings:
enhanced_decoding.py predicts the tokens one by one; bag_of_words.py predicts which words occur.

Shapes: T packed tokens, M masked tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from bertkit.data.samples import Samples, Targets
from bertkit.errors import UsageError
from bertkit.objectives.base import Objective, Target
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.text.tokenizer import Tokenizer


class UnmaskedText(Objective):
    """An objective whose targets are tokens of the unmasked text."""

    target: ClassVar[Target | None] = "token"
    rank: ClassVar[int] = MaskedLM.rank + 1

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        beside = tuple(each for each in objectives if each.draws and not isinstance(each, UnmaskedText))
        if not any(each.term == MaskedLM.term for each in beside):
            return [self._needs_masked_lm]
        return [
            f"objective.{self.term} predicts the tokens of the text, but objective.{each.term} changes or chooses some,"
            " too; leave one of the two out"
            for each in beside
            if each.term != MaskedLM.term
        ]

    def unmasked(self, samples: Samples) -> Samples:
        """The samples with the text's tokens in place of masks.

        Raises:
            UsageError: if no masked LM has chosen tokens.
        """
        masked = samples.targets.get(MaskedLM.term)
        if masked is None:
            raise UsageError(self._needs_masked_lm)
        ids_T = samples.ids_T.copy()
        ids_T[masked.index_M] = masked.id_M
        return samples.with_changes(ids_T=ids_T)

    def described(self, targets: Targets, tokenizer: Tokenizer) -> list[str | None]:
        """Nothing: the targets are the tokens themselves."""
        return [None] * targets.id_M.size

    @property
    def _needs_masked_lm(self) -> str:
        return f"objective.{self.term} needs masked_lm, which trains the encoder and the head; add `- masked_lm`"
