"""What `bertkit bench` measures: which work, on which model and text, how often.

Own design. The sizes are shapes of published models; weights are random, for no time depends on their values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import Field

from bertkit.settings import Settings


class Benchmark(StrEnum):
    """A kind of work, in the order in which they are measured."""

    pretrain = "pretrain"
    finetune = "finetune"
    embed = "embed"
    generate = "generate"
    tokenize = "tokenize"
    startup = "startup"


@dataclass(frozen=True)
class ModelSize:
    """The shape of a BERT, and the sequences of an update.

    Attributes:
        width: of the hidden states.
        layers: of the encoder.
        heads: of each attention.
        sequences: of one update, of `pretrain`.
    """

    width: int
    layers: int
    heads: int
    sequences: int


SIZES = {
    "tiny": ModelSize(128, 2, 2, 32),
    "small": ModelSize(256, 4, 4, 32),
    "base": ModelSize(768, 12, 12, 16),
}
"""BERT tiny, 256 x 4 and base; Turc et al. 2019, arXiv:1908.08962, table 1."""


class BenchSettings(Settings):
    """What `bertkit bench` measures."""

    rounds: int = Field(5, ge=1, le=10_000, description="Rounds in which every side is timed once.")
    size: Literal["tiny", "small", "base"] = Field(
        "small", description="Shape of the random model: BERT tiny (128 x 2), 256 x 4, or BERT base."
    )
    model: str | None = Field(
        None,
        description="Model of finetune and embed: a Hub id, a model or a run directory (default: BERTKIT_MODEL, else a"
        " random one of --size).",
    )
    data: list[str] = Field(["builtin:pydocs"], min_length=1, description="Sources of text, as of pretrain.")
    tokenizer: str | None = Field(
        None,
        description="Tokenizer of the random model: a directory, a file or a Hub id (default: learnt from the text).",
    )
    vocab_size: int = Field(30_522, ge=100, description="Entries of the vocabulary that is learnt from the text.")
    sequences: int | None = Field(
        None, ge=1, description="Sequences of an update of pretrain (default: 32, of --size base 16)."
    )
    length: int = Field(128, ge=8, le=512, description="Tokens of the longest sequence in training.")
    texts: int = Field(256, ge=1, description="Texts of a round of embed.")
    prompts: int = Field(4, ge=1, description="Prompts of generate, decoded at once.")
    new_tokens: int = Field(64, ge=1, le=900, description="New tokens of a prompt of generate.")
    megabytes: float = Field(8.0, gt=0, description="Text of a round of tokenize.")
    processes: int = Field(2, ge=1, description="Processes of tokenize.")
    peers: bool = Field(True, description="Time other libraries beside bertkit, where they are installed.")
