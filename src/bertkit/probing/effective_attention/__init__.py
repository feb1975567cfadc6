"""`probe effective-attention`: the settings; measured by run.py."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from bertkit.probing import ProbeSettings


class EffectiveAttentionSettings(ProbeSettings):
    """Measure how much of the attention does not affect the output, by text length:
    `bertkit probe effective-attention --model M --data F`"""

    kind: ClassVar[str] = "effective-attention"

    sentences: int = Field(
        1000, ge=1, description="Number of sentences, drawn at random from the text, that the texts are composed of."
    )
    texts: int = Field(20, ge=1, description="Number of texts per length.")
    lengths: list[int] = Field(
        default_factory=list,
        description="Length of the texts in tokens (default: several from 8 to the model's maximum).",
    )
