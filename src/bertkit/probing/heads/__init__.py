"""`probe heads`: the settings; measured by run.py."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bertkit.probing import ProbeSettings


class HeadsSettings(ProbeSettings):
    """Which heads a model could do without: `bertkit probe heads --model M --data text.txt`, or --task rte"""

    kind: ClassVar[str] = "heads"

    task: str | None = Field(
        None,
        description="The task that the model was fine-tuned on, in place of words of --data (default: its run's own).",
    )
    sentences: int = Field(1000, ge=1, description="Sentences, or training examples, that importance is the mean of.")
    score_sentences: int = Field(
        200, ge=1, description="Held-out sentences, or dev examples, that every ablation is scored on."
    )
    normalise: Literal["layer", "none"] = Field(
        "layer",
        description="Whether heads are ranked by importance divided by its L2 norm over the layer, or as it is.",
    )
    prune_share: float = Field(0.1, gt=0, le=1, description="Share of all heads that each step of pruning removes.")
    random_orders: int = Field(3, ge=0, description="Random orders of pruning, as a baseline.")
    mask_rate: float = Field(0.15, gt=0, lt=1, description="Share of a sentence's tokens that is masked (text only).")
