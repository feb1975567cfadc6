"""Settings of the suites of `bertkit eval`: what decides a suite's result beside model and data.

Own design. They are kept apart from the suites, and import no torch, because options are generated from them.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bertkit.settings import Settings

SPECIAL_TOKENS = 2
MIN_TOKENS = 8
"""A shorter rest of a document is no window."""

USUAL_LENGTH = 128
"""The length of the figure and of the compression table where it is among those that are measured."""


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
    "How a sentence is scored (default: as the model's config.json says it was trained, else original with a masked-LM"
    " head, query_stream with XLNet's, else left_to_right)."
)


class BlimpSettings(Settings):
    """What `bertkit eval blimp` scores."""

    rule: RuleName | None = Field(None, description=_RULE)
    pairs: int | None = Field(None, ge=1, description="Pairs of each paradigm, drawn at random (default: all).")
    only: list[str] = Field(
        default_factory=list,
        description="Paradigms, fields or phenomena, as patterns such as `anaphor_*` (default: all).",
    )
    seed: int = Field(0, ge=0, description="Seed of the draw of pairs.")


class BabylmSettings(Settings):
    """What `bertkit eval babylm` scores."""

    rule: RuleName | None = Field(None, description=_RULE)
    sample: Literal["full", "fast"] = Field(
        "full", description="The sets of the final score, or the samples that the challenge scores checkpoints on."
    )
    only: list[str] = Field(
        default_factory=list, description="These tasks only, such as blimp or entity_tracking (default: all)."
    )
    items: int | None = Field(
        None,
        ge=1,
        description="Items of each subset, drawn at random, for a quick look (default: all). Reading times are always"
        " scored whole.",
    )
    seed: int = Field(0, ge=0, description="Seed of the draw of items, and of resamples.")
    finetune: list[str] = Field(
        default_factory=list,
        description="Fine-tune on these tasks of the (Super)GLUE subset too, such as rte, or all, as officially"
        " (default: none; it takes hours).",
    )
    finetune_steps: int | None = Field(
        None, ge=1, description="At most this many updates of each fine-tuning, for a quick look (default: all)."
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"finetune", "finetune_steps"})


class MlmSettings(Settings):
    """What `bertkit eval mlm` scores."""

    sequence_length: int | None = Field(
        None,
        ge=MIN_TOKENS + SPECIAL_TOKENS,
        description="Tokens of a window (default: 128, or as many as the model reads).",
    )
    window_bytes: int | None = Field(
        None,
        ge=16,
        description="Cut the text into windows of whole words with at most so many bytes, whatever the tokenizer, in"
        " place of windows of sequence_length tokens; gives bits per byte, which compares models of different"
        " vocabularies.",
    )
    sequences: int = Field(512, ge=1, description="Windows that are masked, drawn at random from the whole text.")
    pseudo_sequences: int = Field(
        16, ge=0, description="Windows scored with each token masked in turn, for the pseudo-perplexity."
    )
    rate: float = Field(0.15, gt=0, lt=1, description="Share of a window's tokens that is masked.")
    seed: int = Field(0, ge=0, description="Seed of the draws of windows and masks.")

    @model_validator(mode="after")
    def _one_kind_of_window(self) -> Self:
        if self.window_bytes is not None and self.sequence_length is not None:
            raise ValueError("sequence_length and window_bytes both say how long a window is; give one of them")
        return self


class LmSettings(Settings):
    """What `bertkit eval lm` scores."""

    sequence_length: int | None = Field(
        None, ge=2, description="Tokens of a window (default: as many as the model reads, at most 1024)."
    )
    stride: int | None = Field(
        None,
        ge=1,
        description="Tokens by which a window is further on than the one before; only those that are new are scored"
        " (default: half a window).",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Score so many tokens at most, the first of the text (default: all)."
    )
    rule: Literal["left_to_right", "encoder_left_to_right"] | None = Field(
        None,
        description="How the model is read (default: left_to_right by a causal head, else an encoder with causal"
        " attention).",
    )


class TranslationSettings(Settings):
    """How `bertkit eval translation` translates."""

    beam: int = Field(4, ge=1, le=1000, description="Width of the beam search.")
    length_penalty: float = Field(
        0.6,
        ge=-10,
        le=10,
        description="Power of (5 + length) / 6, by which the log-probability of an output is divided.",
    )
    max_new_tokens: int | None = Field(
        None, ge=1, le=60_000, description="Tokens of an output at most (default: 50 more than its source has)."
    )
    max_pairs: int | None = Field(None, ge=1, description="Translate so many pairs, the first ones (default: all).")
    text_field: str = Field("source", description="Field of the source in JSONL, Parquet and Hub records.")
    target_field: str = Field("target", description="Field of the target in JSONL, Parquet and Hub records.")


class SpeedSettings(Settings):
    """What `bertkit eval speed` measures."""

    models: list[str] = Field(
        min_length=1,
        description="A Hub id, a model or a run directory; the first is what the others are compared with.",
    )
    batch_sizes: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 32], min_length=1, description="Sentences computed at once."
    )
    lengths: list[Annotated[int, Field(ge=1)]] = Field(
        [32, 128, 512], min_length=1, description="Tokens of a sentence, special ones included."
    )
    threads: int | None = Field(
        None, ge=1, description="Threads of torch's operators (default: as many as it chooses)."
    )
    clock: Literal["wall", "processor"] = Field(
        "wall", description="Wall time; or processor time of one thread, which other processes hardly change."
    )
    rounds: int = Field(7, ge=1, description="Rounds in which every model is timed once.")
    seed: int = Field(0, ge=0, description="Seed of the draw of tokens.")

    @property
    def reported_length(self) -> int:
        """The one length of the figure and of the compression table: 128, or the nearest there is."""
        return min(self.lengths, key=lambda length: abs(length - USUAL_LENGTH))
