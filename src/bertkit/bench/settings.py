"""Settings of `bertkit bench`: which work is measured, on which model and text, and how often.

Not from a paper. The sizes are those of published models; weights are random, since their values do not affect the
time.
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
    """The shape of a BERT, and the number of sequences per update.

    Attributes:
        width: of the hidden states.
        layers: of the encoder.
        heads: of each attention.
        sequences: per update of `pretrain`.
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

    rounds: int = Field(5, ge=1, le=10_000, description="Number of rounds; every library is timed once per round.")
    size: Literal["tiny", "small", "base"] = Field(
        "small",
        description="Size of the random model: BERT-tiny (128 wide, 2 layers), 256 wide with 4 layers, or BERT-base.",
    )
    model: str | None = Field(
        None,
        description="Model for finetune and embed: a Hub id, a model directory or a run directory (default:"
        " BERTKIT_MODEL, else a random one of --size).",
    )
    data: list[str] = Field(["builtin:pydocs"], min_length=1, description="Text sources, as for pretrain.")
    tokenizer: str | None = Field(
        None,
        description="Tokenizer of the random model: a directory, a file or a Hub id (default: trained on the text).",
    )
    vocab_size: int = Field(30_522, ge=100, description="Vocabulary size of the tokenizer that is trained on the text.")
    sequences: int | None = Field(
        None, ge=1, description="Sequences per update of pretrain (default: 32, or 16 with --size base)."
    )
    length: int = Field(128, ge=8, le=512, description="Maximum training sequence length in tokens.")
    texts: int = Field(256, ge=1, description="Texts per round of embed.")
    prompts: int = Field(4, ge=1, description="Prompts of generate, decoded as one batch.")
    new_tokens: int = Field(64, ge=1, le=900, description="New tokens per prompt of generate.")
    megabytes: float = Field(8.0, gt=0, description="Megabytes of text per round of tokenize.")
    processes: int = Field(2, ge=1, description="Number of processes for tokenize.")
    peers: bool = Field(True, description="Also time other libraries, if they are installed.")
