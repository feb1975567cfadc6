"""The objectives by the name that a recipe gives them; a new one is one file and one entry here."""

from __future__ import annotations

from bertkit.objectives.base import Objective
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masked_next_token import MaskedNextToken
from bertkit.objectives.next_sentence import NextSentence
from bertkit.objectives.replaced_token import ReplacedToken
from bertkit.objectives.sentence_order import SentenceOrder
from bertkit.objectives.sentence_structure import SentenceStructure
from bertkit.objectives.span_boundary import SpanBoundary
from bertkit.objectives.word_order import WordOrder

OBJECTIVES: dict[str, type[Objective]] = {
    kind.term: kind
    for kind in (
        CausalLM,
        MaskedLM,
        MaskedNextToken,
        NextSentence,
        ReplacedToken,
        SentenceOrder,
        SentenceStructure,
        SpanBoundary,
        WordOrder,
    )
}
