"""Masking strategies, one file each: which tokens are masked together; selected by `units.name` in a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bertkit.objectives.masking.annotated import AnnotatedSpans
from bertkit.objectives.masking.base import Chosen, MaskingStrategy
from bertkit.objectives.masking.entity_spans import EntitySpans
from bertkit.objectives.masking.ngrams import Ngrams
from bertkit.objectives.masking.phrases import Phrases
from bertkit.objectives.masking.rare import RareTokens
from bertkit.objectives.masking.spans import Spans
from bertkit.objectives.masking.tiled_spans import TiledSpans
from bertkit.objectives.masking.tokens import Tokens
from bertkit.objectives.masking.windowed_ngrams import WindowedNgrams
from bertkit.objectives.masking.words import Words

AnyUnits = Annotated[
    Tokens | Words | Ngrams | WindowedNgrams | Spans | TiledSpans | EntitySpans | Phrases | AnnotatedSpans | RareTokens,
    Field(discriminator="name"),
]

__all__ = [
    "AnnotatedSpans",
    "AnyUnits",
    "Chosen",
    "EntitySpans",
    "MaskingStrategy",
    "Ngrams",
    "Phrases",
    "RareTokens",
    "Spans",
    "TiledSpans",
    "Tokens",
    "WindowedNgrams",
    "Words",
]
