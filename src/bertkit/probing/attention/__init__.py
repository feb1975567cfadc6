"""`probe attention`: the settings; measured by run.py."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from bertkit.probing import ProbeSettings


class AttentionSettings(ProbeSettings):
    """What every head attends to, with an HTML viewer; with a treebank, the dependencies that heads find:
    `bertkit probe attention --model M --data treebank.conllu`"""

    kind: ClassVar[str] = "attention"

    sentences: int = Field(1000, ge=1, description="Sentences, drawn at random from the text.")
    divergence_tokens: int = Field(
        5000, ge=1, description="Tokens on which all heads are compared, about; all tokens where there are fewer."
    )
    pattern_pairs: int = Field(100, ge=0, description="Pairs of sentences whose maps are classified by shape.")
    least_words: int = Field(50, ge=1, description="Relations of a treebank with fewer words are not reported.")
    show: list[str] = Field(
        default_factory=list, description="A sentence for the viewer (default: some sentences of the text)."
    )
    viewed: int = Field(6, ge=0, description="Sentences of the text in the viewer where none is given.")
