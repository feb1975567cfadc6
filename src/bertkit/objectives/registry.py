"""The objectives by the name that a recipe gives them; a new one is one file and one entry here."""

from __future__ import annotations

from bertkit.objectives.base import Objective
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.next_sentence import NextSentence

OBJECTIVES: dict[str, type[Objective]] = {kind.term: kind for kind in (CausalLM, MaskedLM, NextSentence)}
