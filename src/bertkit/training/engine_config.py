"""The engine section of a recipe: what decides speed and what is reported, and is not hashed.

Own design. It stands alone, without torch, because options of the command line are generated from it. Sibling engine.py
decides what is `auto`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bertkit.settings import Settings


class EngineConfig(Settings):
    """How fast, where, and how often it says so; never changes the result beyond rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to train.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Of matrix products; auto takes bf16 where the processor has instructions for it."
    )
    micro_batch_tokens: int | Literal["auto"] = Field("auto", description="Tokens computed at once.")
    workers: int | Literal["auto"] = Field(
        "auto", description="Processes that prepare batches; 0: a thread of this one, the best where the cores compute."
    )
    log_every_steps: int = Field(20, ge=1, description="Updates between two lines of metrics.jsonl.")
    evaluate_every_steps: int = Field(1000, ge=1, description="Updates between two looks at the held-out text.")
    evaluation_sequences: int = Field(512, ge=1, description="Held-out sequences of each look.")
    pseudo_perplexity_sequences: int = Field(
        16,
        ge=0,
        description="Held-out sequences scored at the end with tokens masked in turn: each, or 64 of a long one.",
    )
    save_every_steps: int = Field(1000, ge=1, description="Updates between two checkpoints.")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints kept.")
    examples: list[str] = Field(
        default_factory=list, description="Texts with [MASK] that are filled in when training is done."
    )
