"""The objectives by their name in recipes. A new one is one file next to this one and one entry here.

docs/add-an-objective.md is a worked example.
"""

from __future__ import annotations

from bertkit.models.heads import add_head
from bertkit.objectives.bag_of_words import BagOfWords
from bertkit.objectives.base import Objective
from bertkit.objectives.capitalisation import Capitalisation
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.denoising import Denoising
from bertkit.objectives.directional_lm import BackwardLM, ForwardLM
from bertkit.objectives.enhanced_decoding import EnhancedDecoding
from bertkit.objectives.masked_diffusion import MaskedDiffusion
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masked_next_token import MaskedNextToken
from bertkit.objectives.masked_permuted_lm import MaskedPermutedLM
from bertkit.objectives.noise_contrastive import NoiseContrastive
from bertkit.objectives.permutation_lm import PermutationLM
from bertkit.objectives.pondering import Pondering
from bertkit.objectives.random_token_detection import RandomTokenDetection
from bertkit.objectives.replaced_token import ReplacedToken
from bertkit.objectives.sentence_relations import NextSentence, SentenceOrder, SentenceStructure
from bertkit.objectives.seq2seq_lm import Seq2SeqLM
from bertkit.objectives.span_boundary import SpanBoundary
from bertkit.objectives.span_corruption import SpanCorruption
from bertkit.objectives.token_document import TokenDocument
from bertkit.objectives.two_tower_cloze import TwoTowerCloze
from bertkit.objectives.word_order import WordOrder

OBJECTIVES: dict[str, type[Objective]] = {}


def register(kind: type[Objective]) -> None:
    """Make an objective available to recipes, and its head to every encoder family."""
    OBJECTIVES[kind.term] = kind
    if kind.outputs:
        add_head(kind.term, "sequences" if kind.states == "sequences" else "tokens", kind.outputs)


register(BackwardLM)
register(BagOfWords)
register(Capitalisation)
register(CausalLM)
register(Denoising)
register(EnhancedDecoding)
register(ForwardLM)
register(MaskedDiffusion)
register(MaskedLM)
register(MaskedNextToken)
register(MaskedPermutedLM)
register(NextSentence)
register(NoiseContrastive)
register(PermutationLM)
register(Pondering)
register(RandomTokenDetection)
register(ReplacedToken)
register(Seq2SeqLM)
register(SentenceOrder)
register(SentenceStructure)
register(SpanBoundary)
register(SpanCorruption)
register(TokenDocument)
register(TwoTowerCloze)
register(WordOrder)
