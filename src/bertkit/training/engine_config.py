"""The engine section of a recipe: what decides speed and what is reported, and is not hashed.

Own design. It stands alone, without torch, because options of the command line are generated from it. Sibling engine.py
decides what is `auto`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bertkit.settings import Settings


class EngineConfig(Settings):
    """Where and how fast the run computes, and how often it reports; never changes the result beyond rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to compute.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Number format of matrix products; auto: bf16 where the processor has instructions for it."
    )
    micro_batch_tokens: int | Literal["auto"] = Field(
        "auto", description="Tokens computed at once; changes speed and memory alone."
    )
    workers: int | Literal["auto"] = Field(
        "auto", description="Processes that prepare batches; 0: a thread of the training process, the fastest on a CPU."
    )
    log_every_steps: int = Field(20, ge=1, description="Updates between two lines of metrics.jsonl.")
    evaluate_every_steps: int = Field(1000, ge=1, description="Updates between two evaluations on the held-out text.")
    evaluation_sequences: int = Field(512, ge=1, description="Held-out sequences of each evaluation.")
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
