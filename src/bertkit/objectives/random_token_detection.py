"""Random-token detection: predict which tokens were replaced by random ones.

Di Liello et al. 2022, "Effective pretraining objectives for transformer-based autoencoders", arXiv:2210.13536, Random
Token Substitution: ELECTRA's binary target with random tokens in place of a generator, without a second model or a
projection to the vocabulary. Sibling of replaced_token.py, whose head it shares. It is used alone or together with
masked_lm, whose targets it does not change.

As in the authors' code (lucadiliello/transformers-lightning, random_token_substitution.py): 15% of the tokens; special
tokens are never replaced and left out of the loss; random tokens are drawn from the whole vocabulary; a token that is
replaced by itself counts as replaced. Quirk left: there each token is chosen at random, here the count per sequence is
exact.

Shapes: T packed tokens, B sequences, M tokens that are not special.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.objectives.base import CompanionObjective, Objective, TokenDetection
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking.base import smallest
from bertkit.objectives.schedule import Rate, rate_at


class RandomTokenDetection(TokenDetection):
    """Binary classification of every token that is not special: original or random."""

    rate: Rate = Field(
        0.15,
        description="Share of the tokens that is replaced: a number, or a linear change over the run, such as"
        " {start: 0.3, end: 0.15}.",
    )

    term: ClassVar[str] = "random_token_detection"
    label_names: ClassVar[tuple[str, ...]] = ("original", "replaced")
    rank: ClassVar[int] = MaskedLM.rank + 2
    """After all others, so that their targets are unchanged."""

    @property
    def heads(self) -> tuple[str, ...]:
        """ELECTRA's head: the model can be loaded as an ELECTRA discriminator."""
        return ("replaced_token",)

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        errors = [
            f"objective.{self.term} would take tokens that objective.{each.term} replaces for the text's own; leave one"
            " of them out"
            for each in objectives
            if isinstance(each, CompanionObjective)
        ]
        return errors + [
            f"objective.{self.term} could replace tokens that objective.{each.term} has masked; use masked_lm with it"
            for each in objectives
            if isinstance(each, MaskedLM) and not each.in_place
        ]

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Replace an exact share of the tokens that no other objective predicts; the target is 1 if replaced."""
        free_T = samples.free_T
        total_B = np.bincount(samples.sequence_T[free_T], minlength=samples.lengths_B.size)
        count_B = np.maximum(1, np.rint(rate_at(self.rate, 0) * total_B)).astype(np.int64)
        replaced_T = smallest(samples.uniform_T(draw, "random-token/choose"), free_T, count_B, samples)
        random_T = (samples.uniform_T(draw, "random-token/word") * vocabulary.size).astype(np.int64)
        ids_T = np.where(replaced_T, random_T, samples.ids_T)
        index_M = np.flatnonzero(free_T)
        return samples.with_targets(self.term, Targets(index_M, replaced_T[index_M].astype(np.int64)), ids_T=ids_T)
