"""`probe effective-attention`: the settings; measured by run.py."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from bertkit.probing import ProbeSettings


class EffectiveAttentionSettings(ProbeSettings):
    """How much of attention does not affect the output, by length:
    `bertkit probe effective-attention --model M --data F`"""

    kind: ClassVar[str] = "effective-attention"

    sentences: int = Field(1000, ge=1, description="Sentences, drawn at random from the text, that texts are made of.")
    texts: int = Field(20, ge=1, description="Texts of each length.")
    lengths: list[int] = Field(
        default_factory=list, description="Length of the texts in tokens (default: from 8 to what the model reads)."
    )
