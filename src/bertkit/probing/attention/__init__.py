"""`probe attention`: the settings; measured by run.py."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from bertkit.probing import ProbeSettings


class AttentionSettings(ProbeSettings):
    """Show what every head attends to, with an HTML viewer; with a treebank, also the dependencies that heads find:
    `bertkit probe attention --model M --data treebank.conllu`"""

    kind: ClassVar[str] = "attention"

    sentences: int = Field(1000, ge=1, description="Number of sentences, drawn at random from the text.")
    divergence_tokens: int = Field(
        5000,
        ge=1,
        description="Approximate number of tokens on which all heads are compared, or all tokens if there are fewer.",
    )
    pattern_pairs: int = Field(
        100, ge=0, description="Number of sentence pairs whose attention maps are classified by shape."
    )
    least_words: int = Field(
        50, ge=1, description="Minimum number of words; rarer relations of a treebank are not reported."
    )
    show: list[str] = Field(
        default_factory=list, description="Sentence to show in the viewer (default: some sentences of the text)."
    )
    viewed: int = Field(6, ge=0, description="Number of sentences of the text to show in the viewer if none is given.")
