"""Two-tower cloze model: every token is predicted from the tokens to its left and, separately, those to its right.

Clark et al. 2020, Electric, arXiv:2012.08561, section 2.3; as `_get_cloze_outputs` of google-research/electra. It
trains the companion of noise_contrastive.py, from whose distribution the noise is drawn. Sibling of masked_lm.py, which
masks the tokens that it predicts; here nothing is masked, since no state that predicts a token has read it
(models/families/two_tower.py).

Shapes: T packed tokens, M tokens that are not special.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.models.headed import HeadedModel
from bertkit.objectives.base import CompanionObjective, Objective, TokenPrediction
from bertkit.text.tokenizer import Tokenizer

COMPANION = "cloze_model"
"""Name of the companion that it trains."""


class TwoTowerCloze(TokenPrediction):
    """Predict every token that is not special from both sides, by a companion with two towers."""

    term: ClassVar[str] = "two_tower_cloze"
    learnt_by: ClassVar[str | None] = COMPANION
    is_random: ClassVar[bool] = False

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        if any(isinstance(each, CompanionObjective) and each.companion == COMPANION for each in objectives):
            return []
        return [
            "objective.two_tower_cloze trains the model that draws the noise of noise_contrastive; add"
            " `- noise_contrastive`"
        ]

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        index_M = np.flatnonzero(~samples.special_T)
        return samples.with_targets(self.term, Targets(index_M, samples.ids_T[index_M]))

    def reads(self, model: HeadedModel, batch: PackedBatch) -> Tensor | None:
        """All tokens: the noise is also scored at special ones."""
        return None

    def expected_reads(self, model: HeadedModel, predictions: float) -> float | None:
        return None

    def expected_count(self, length: int) -> float:
        return max(0.0, length - 2.0)

    def described(self, targets: Targets, tokenizer: Tokenizer) -> list[str | None]:
        """Nothing: every token is its own target."""
        return [None] * targets.id_M.size
