"""Settings of the suites of `bertkit eval`: what determines a suite's result, apart from model and data.

They are separate from the suites and do not import torch, because command-line options are generated from them.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bertkit.settings import Settings

SPECIAL_TOKENS = 2
MIN_TOKENS = 8
"""A shorter remainder of a document is not used as a window."""

USUAL_LENGTH = 128
"""The length for the figure and the compression table, if it is among the measured ones."""


RuleName = Literal[
    "original",
    "within_word_l2r",
    "left_to_right",
    "encoder_left_to_right",
    "masked_next_token",
    "query_stream",
    "energy",
]
_RULE = (
    "How a sentence is scored (default: by the training objective in the model's config.json, else original with a"
    " masked-LM head, query_stream with XLNet's, else left_to_right)."
)


class BlimpSettings(Settings):
    """What `bertkit eval blimp` scores."""

    rule: RuleName | None = Field(None, description=_RULE)
    pairs: int | None = Field(None, ge=1, description="Pairs per paradigm, drawn at random (default: all).")
    only: list[str] = Field(
        default_factory=list,
        description="Paradigm, field or phenomenon to score, or a pattern such as `anaphor_*` (default: all).",
    )
    seed: int = Field(0, ge=0, description="Seed for drawing pairs.")


class BabylmSettings(Settings):
    """What `bertkit eval babylm` scores."""

    rule: RuleName | None = Field(None, description=_RULE)
    sample: Literal["full", "fast"] = Field(
        "full",
        description="full: the sets of the final score; fast: the samples on which the challenge scores checkpoints.",
    )
    only: list[str] = Field(
        default_factory=list, description="Task to run, such as blimp or entity_tracking (default: all)."
    )
    items: int | None = Field(
        None,
        ge=1,
        description="Items per subset, drawn at random, for a quick check (default: all). Reading times and ages"
        " of acquisition are always scored in full.",
    )
    seed: int = Field(0, ge=0, description="Seed for drawing items and resamples.")
    finetune: list[str] = Field(
        default_factory=list,
        description="Also fine-tune on this task of the (Super)GLUE subset, such as rte, or on all, as in the"
        " official evaluation (default: none; it takes hours).",
    )
    finetune_steps: int | None = Field(
        None, ge=1, description="Maximum number of updates per fine-tuning run, for a quick check (default: no limit)."
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"finetune", "finetune_steps"})


class MlmSettings(Settings):
    """What `bertkit eval mlm` scores."""

    sequence_length: int | None = Field(
        None,
        ge=MIN_TOKENS + SPECIAL_TOKENS,
        description="Window length in tokens (default: 128, or the model's maximum if that is less).",
    )
    window_bytes: int | None = Field(
        None,
        ge=16,
        description="Cut the text into windows of whole words with at most this many bytes, whatever the tokenizer,"
        " in place of windows of sequence_length tokens. This gives bits per byte, which compares models with"
        " different vocabularies.",
    )
    sequences: int = Field(512, ge=1, description="Number of windows to mask, drawn at random from the whole text.")
    pseudo_sequences: int = Field(
        16, ge=0, description="Windows scored with each token masked one at a time, for the pseudo-perplexity."
    )
    rate: float = Field(0.15, gt=0, lt=1, description="Masking rate: share of a window's tokens that is masked.")
    seed: int = Field(0, ge=0, description="Seed for drawing windows and masks.")
    text_field: str = Field("text", description="Field of the text in JSON Lines, CSV, Parquet and Hub records.")

    later_fields: ClassVar[frozenset[str]] = frozenset({"text_field"})

    @model_validator(mode="after")
    def _one_kind_of_window(self) -> Self:
        if self.window_bytes is not None and self.sequence_length is not None:
            raise ValueError("sequence_length and window_bytes both set the length of a window; give one of them")
        return self


class LmSettings(Settings):
    """What `bertkit eval lm` scores."""

    sequence_length: int | None = Field(
        None, ge=2, description="Window length in tokens (default: the model's maximum, up to 1024)."
    )
    stride: int | None = Field(
        None,
        ge=1,
        description="Number of tokens from the start of one window to the start of the next; only new tokens are"
        " scored (default: half a window).",
    )
    max_tokens: int | None = Field(None, ge=1, description="Score only the first N tokens of the text (default: all).")
    rule: Literal["left_to_right", "encoder_left_to_right"] | None = Field(
        None,
        description="Scoring rule (default: left_to_right with a causal head, else encoder_left_to_right: an encoder"
        " with causal attention).",
    )
    text_field: str = Field("text", description="Field of the text in JSON Lines, CSV, Parquet and Hub records.")

    later_fields: ClassVar[frozenset[str]] = frozenset({"text_field"})


class SurprisalSettings(Settings):
    """How `bertkit eval surprisal` reads."""

    rule: RuleName | None = Field(None, description=_RULE)
    context_lines: int = Field(
        0,
        ge=0,
        description="Number of preceding lines of the same document that the model reads before each sentence, fewer if"
        " it cannot read that many.",
    )
    text_field: str = Field("text", description="Field of the sentence in JSON Lines, CSV, Parquet and Hub records.")


class TranslationSettings(Settings):
    """How `bertkit eval translation` translates."""

    beam: int = Field(4, ge=1, le=1000, description="Beam width.")
    length_penalty: float = Field(
        0.6,
        ge=-10,
        le=10,
        description="Length penalty: an output's log-probability is divided by (5 + length) / 6 to this power.",
    )
    max_new_tokens: int | None = Field(
        None, ge=1, le=60_000, description="Maximum length of an output in tokens (default: 50 more than its source)."
    )
    max_pairs: int | None = Field(None, ge=1, description="Translate only the first N pairs (default: all).")
    text_field: str = Field("source", description="Field of the source in JSON Lines, Parquet and Hub records.")
    target_field: str = Field("target", description="Field of the target in JSON Lines, Parquet and Hub records.")


class SpeedSettings(Settings):
    """What `bertkit eval speed` measures."""

    models: list[str] = Field(
        min_length=1,
        description="Model to measure: a Hub id, a model directory or a run directory. The others are compared with"
        " the first one.",
    )
    batch_sizes: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 32], min_length=1, description="Batch sizes: sentences computed at once."
    )
    lengths: list[Annotated[int, Field(ge=1)]] = Field(
        [32, 128, 512], min_length=1, description="Sentence lengths in tokens, including special tokens."
    )
    threads: int | None = Field(
        None, ge=1, description="Number of threads for torch's operators (default: chosen by torch)."
    )
    clock: Literal["wall", "processor"] = Field(
        "wall",
        description="wall: wall-clock time; processor: processor time of one thread, which other processes hardly"
        " affect.",
    )
    rounds: int = Field(7, ge=1, description="Number of rounds; every model is timed once per round.")
    against: Literal["score", "parameters", "disk_mb"] | None = Field(
        None,
        description="What the figure shows against milliseconds: the mean score of the tasks that all models have,"
        " parameters, or the size of the weight files, which differs for int8 weights (default: score if all models"
        " have a common task, else parameters).",
    )
    seed: int = Field(0, ge=0, description="Seed for drawing tokens.")

    later_fields: ClassVar[frozenset[str]] = frozenset({"against"})

    @property
    def reported_length(self) -> int:
        """The length for the figure and the compression table: 128, or the nearest measured one."""
        return min(self.lengths, key=lambda length: abs(length - USUAL_LENGTH))
