"""Masked next-token prediction: a masked token is predicted from the state before it, like a causal model's next token.

Charpentier and Samuel 2024, GPT-BERT, arXiv:2410.24159, section 2: masked and causal examples share one head (sibling
causal_lm.py). Tokens are chosen and masked as in masked_lm.py; only the predicting state differs. Scores of a model
trained like this must also be read at the state before a token.

Quirk left: in the released code, documents that share a sample each begin with <s>; here a separator is between them,
and its state predicts the token after it.

Shapes: T packed tokens, M predicted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from bertkit.data.config import DataConfig
from bertkit.data.layouts import LaneLayout
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.objectives.base import CompanionObjective, Objective
from bertkit.objectives.masked_lm import MaskedLM

_BOTH_MASK = "objective.masked_next_token and objective.masked_lm would mask the same tokens; leave one of them out"


class MaskedNextToken(MaskedLM):
    """The masked LM's corruption and head; each target is predicted from the state of the token to its left."""

    term: ClassVar[str] = "masked_next_token"
    in_place: ClassVar[bool] = False
    fills_masks: ClassVar[bool] = False
    learnt_by: ClassVar[str | None] = None
    rank: ClassVar[int] = MaskedLM.rank + 1

    @property
    def scoring_rule(self) -> str | None:
        return self.term

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        found = super().errors(data, model)
        if isinstance(data.layout, LaneLayout):
            found.append(
                f"objective.{self.term} needs sequences that begin with a special token, but those of data.layout"
                f" {data.layout.choice} begin anywhere in the text; use another layout, such as full-sentences"
            )
        return found

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        if any(objective.term == MaskedLM.term for objective in objectives):
            return [_BOTH_MASK]
        leaders = [each for each in objectives if isinstance(each, CompanionObjective)]
        return [
            f"objective.{leader.term} needs objective.masked_lm, not {self.term}, to choose the tokens"
            for leader in leaders
            if leader.companion == MaskedLM.learnt_by
        ]

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """As the masked LM, with every target one position earlier.

        A sample begins with a special token, which is never chosen, so the position before is in the same sample.

        Raises:
            UsageError: if a masked LM has already masked tokens.
        """
        if MaskedLM.term in samples.targets:
            raise UsageError(_BOTH_MASK)
        corrupted = super().corrupt(samples, vocabulary, draw)
        chosen = corrupted.targets[self.term]
        assert (samples.position_T[chosen.index_M] > 0).all(), "a sample begins with a special token"
        return corrupted.with_targets(self.term, Targets(chosen.index_M - 1, chosen.id_M))
