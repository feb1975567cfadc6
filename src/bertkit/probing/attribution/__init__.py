"""`probe attribution`: the settings; measured by run.py."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bertkit.probing import ProbeSettings

Baseline = Literal["mask", "pad", "zero"]


class AttributionSettings(ProbeSettings):
    """Measure how much each token contributes to a hidden state and to a prediction:
    `bertkit probe attribution --model M --data text.txt --text "The capital of France is [MASK]."`"""

    kind: ClassVar[str] = "attribution"

    sentences: int = Field(
        30, ge=0, description="Number of sentences whose Jacobians are computed, drawn at random from the text; costly."
    )
    directions: int = Field(
        8,
        ge=1,
        description="Number of random directions for estimating a Jacobian's norm; exact from the model's width on.",
    )
    identify_sentences: int = Field(
        500,
        ge=0,
        description="Number of sentences for token identifiability, most of them for training its maps; 0 skips it.",
    )
    epochs: int = Field(10, ge=1, description="Training epochs of the perceptron for token identifiability.")
    texts: list[str] = Field(
        default_factory=list,
        description="Text whose prediction is explained: the word at its one [MASK], or its class.",
    )
    target: str | None = Field(None, description="Word or class to explain (default: the most probable one).")
    methods: list[str] = Field(
        default_factory=list,
        description="Attribution method: integrated_gradients, input_x_gradient, saliency or attention_rollout"
        " (default: all).",
    )
    baseline: Baseline = Field("mask", description="What replaces words in the baseline of integrated gradients.")
    steps: int = Field(50, ge=1, description="Number of points on the path of integrated gradients.")
