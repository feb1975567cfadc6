"""What is masked together: one file per idea, chosen by name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bertkit.objectives.masking.annotated import AnnotatedSpans
from bertkit.objectives.masking.base import Chosen, Units
from bertkit.objectives.masking.ngrams import Ngrams
from bertkit.objectives.masking.phrases import Phrases
from bertkit.objectives.masking.rare import RarePieces
from bertkit.objectives.masking.spans import Spans
from bertkit.objectives.masking.tokens import Pieces
from bertkit.objectives.masking.words import Words

AnyUnits = Annotated[
    Pieces | Words | Ngrams | Spans | Phrases | AnnotatedSpans | RarePieces, Field(discriminator="name")
]

__all__ = [
    "AnnotatedSpans",
    "AnyUnits",
    "Chosen",
    "Ngrams",
    "Phrases",
    "Pieces",
    "RarePieces",
    "Spans",
    "Units",
    "Words",
]
