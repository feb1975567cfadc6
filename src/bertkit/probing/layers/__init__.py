"""`probe layers`: linear probes by layer (Tenney et al. 2019, arXiv:1905.05950) and online codes (arXiv:2003.12298)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bertkit.probing import ProbeSettings
from bertkit.settings import Settings

LEAST_SENTENCES = 10
"""Least number of sentences to train a probe on."""
SpanPooling = Literal["attention", "endpoints", "mean"]


class ProbeFit(Settings):
    """How a linear probe is fitted."""

    penalty: float = Field(
        1.0, gt=0, description="Weight of half the squared parameters, beside the summed cross-entropy."
    )
    max_iterations: int = Field(100, ge=0, description="Maximum number of iterations of L-BFGS.")
    pooling: SpanPooling = Field("attention", description="How the states of a span's words become one vector.")


class LayersSettings(ProbeSettings):
    """Labels of words and spans by layer, and by a learnt mix: `bertkit probe layers --model M --data t.conllu`"""

    kind: ClassVar[str] = "layers"

    tasks: list[str] = Field(
        default_factory=list,
        description="pos, dep, chunks, ner, chunks-spans, ner-spans, tags or a .jsonl file's name (default: all that"
        " the data are annotated for, types of given spans excepted).",
    )
    sentences: int = Field(
        1000, ge=LEAST_SENTENCES, description="Sentences drawn at random from each file for training."
    )
    test_sentences: int = Field(500, ge=1, description="Sentences drawn at random from each file for testing.")
    fit: ProbeFit = Field(default_factory=ProbeFit, description="How each probe is fitted.")
