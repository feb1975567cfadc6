"""What is masked together: one file per idea, chosen by name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bertkit.objectives.units.annotated import AnnotatedSpans
from bertkit.objectives.units.base import Chosen, Units
from bertkit.objectives.units.ngrams import Ngrams
from bertkit.objectives.units.phrases import Phrases
from bertkit.objectives.units.pieces import Pieces
from bertkit.objectives.units.rare import RarePieces
from bertkit.objectives.units.spans import Spans
from bertkit.objectives.units.words import Words

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
