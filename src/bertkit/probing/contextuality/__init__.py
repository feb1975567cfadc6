"""`probe contextuality`: how contextual word vectors are (Ethayarajh 2019, arXiv:1909.00512)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from bertkit.probing import ProbeSettings


class ContextualitySettings(ProbeSettings):
    """Measure how much a word's vector depends on its sentence:
    `bertkit probe contextuality --model M --data text.txt`"""

    kind: ClassVar[str] = "contextuality"

    sentences: int = Field(
        1000, ge=1, description="Number of sentences, drawn at random from the text; repeated sentences are left out."
    )
    words: list[str] = Field(
        default_factory=list, description="Word to measure (default: all that occur often enough)."
    )
    min_contexts: int = Field(5, ge=2, description="Minimum number of sentences in which a word must occur.")
    max_contexts: int = Field(
        100, ge=2, description="Maximum number of sentences per word; more are sampled down to it."
    )
    max_vectors: int = Field(
        20_000, ge=2, description="Maximum number of occurrences in memory; words are sampled until it is reached."
    )
    static_layers: list[int] = Field(
        default_factory=list,
        description="Write one static vector per word, its first principal component in this layer, as word2vec text"
        " (default: none).",
    )
