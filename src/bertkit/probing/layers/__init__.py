"""`probe layers`: linear probes by layer (Tenney et al. 2019, arXiv:1905.05950) and online codes (arXiv:2003.12298)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bertkit.probing import LEAST_SENTENCES, ProbeSettings
from bertkit.settings import Settings

SpanPooling = Literal["attention", "endpoints", "mean"]


class ProbeFit(Settings):
    """How a linear probe is fitted."""

    penalty: float = Field(
        1.0,
        gt=0,
        description="Weight of the L2 penalty, half the squared parameters, that is added to the summed cross-entropy.",
    )
    max_iterations: int = Field(100, ge=0, description="Maximum number of iterations of L-BFGS.")
    pooling: SpanPooling = Field(
        "attention", description="How the states of a span's words are pooled into one vector."
    )


class LayersSettings(ProbeSettings):
    """Predict labels of words and spans from each layer and from a trained mix of layers:
    `bertkit probe layers --model M --data t.conllu`"""

    kind: ClassVar[str] = "layers"

    tasks: list[str] = Field(
        default_factory=list,
        description="Task to probe: pos, dep, chunks, ner, chunks-spans, ner-spans, tags or the name of a .jsonl"
        " file (default: all that the data are annotated for, except the types of given spans).",
    )
    sentences: int = Field(
        1000, ge=LEAST_SENTENCES, description="Number of training sentences, drawn at random from each file."
    )
    test_sentences: int = Field(500, ge=1, description="Number of test sentences, drawn at random from each file.")
    fit: ProbeFit = Field(default_factory=ProbeFit, description="How each probe is fitted.")
