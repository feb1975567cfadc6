"""`probe senses`: word senses by nearest neighbours (Wiedemann et al. 2019, arXiv:1909.10430)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bertkit.probing import ProbeSettings

Candidates = Literal["lemma", "lemma-pos", "word"]


class SensesSettings(ProbeSettings):
    """Predict word senses from nearest neighbours, layer by layer:
    `bertkit probe senses --model M --data semcor.jsonl`"""

    kind: ClassVar[str] = "senses"

    ks: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 3, 5, 10], min_length=1, description="Number of neighbours that vote."
    )
    capped: bool = Field(
        True, description="Cap the number of neighbours at the number of examples of the word's rarest sense."
    )
    candidates: Candidates = Field(
        "lemma", description="What examples must share with a word: lemma, lemma-pos or word (as written)."
    )
    sentences: int = Field(0, ge=0, description="Number of training sentences, drawn at random; 0: all.")
    words: list[str] = Field(default_factory=list, description="Plot the senses of this lemma (default: none).")
