"""`probe heads`: the settings; measured by run.py."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bertkit.probing import ProbeSettings


class HeadsSettings(ProbeSettings):
    """Find the heads that a model can do without: `bertkit probe heads --model M --data text.txt`, or --task rte.
    Layers and heads are counted from 1; `method.heads`, which removes them, counts from 0."""

    kind: ClassVar[str] = "heads"

    task: str | None = Field(
        None,
        description="Task that the model was fine-tuned on, used instead of words of --data (default: the task of"
        " the model's run).",
    )
    sentences: int = Field(
        1000, ge=1, description="Number of sentences, or of training examples, over which importance is averaged."
    )
    score_sentences: int = Field(
        200, ge=1, description="Number of held-out sentences, or of dev examples, on which every ablation is scored."
    )
    normalise: Literal["layer", "none"] = Field(
        "layer",
        description="layer: heads are ranked by importance divided by its L2 norm over the layer; none: by plain"
        " importance.",
    )
    prune_share: float = Field(0.1, gt=0, le=1, description="Share of all heads that is removed in each pruning step.")
    random_orders: int = Field(3, ge=0, description="Number of random pruning orders, as a baseline.")
    mask_rate: float = Field(
        0.15, gt=0, lt=1, description="Masking rate: share of a sentence's tokens that is masked (text only)."
    )
