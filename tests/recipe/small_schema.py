"""A small recipe with every shape of setting in the real schema, without its imports."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from bertkit.settings import Settings


class AdamW(Settings):
    name: Literal["adamw"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6


class Lamb(Settings):
    name: Literal["lamb"] = "lamb"
    trust: bool = True


class Optimisation(Settings):
    optimizer: Annotated[AdamW | Lamb, Field(discriminator="name")] = AdamW()
    peak: float = 1e-4
    steps: int = Field(10, ge=1)


class Encoder(Settings):
    family: Literal["bert", "roberta"] = "bert"
    hidden_size: int = 768
    heads: int = 12

    @model_validator(mode="after")
    def _divisible(self) -> Encoder:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be a multiple of heads ({self.heads})")
        return self


class MaskedLM(Settings):
    rate: float = 0.15


class NextSentence(Settings):
    weight: float = 1.0


class Term(Settings):
    masked_lm: MaskedLM | None = None
    next_sentence: NextSentence | None = None


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Engine(Settings):
    micro_batch_tokens: int | Literal["auto"] = "auto"


class SmallRecipe(Settings):
    name: str
    title: str = ""
    arxiv: str | None = None
    seed: int = 0
    dynamic: bool = True
    colour: Colour = Colour.RED
    folder: Path | None = None
    sources: list[str] = Field(default_factory=lambda: ["a.txt"], min_length=1)
    scores: dict[str, float] = Field(default_factory=dict)
    model: Encoder = Encoder()
    objective: tuple[Term, ...] = ()
    optimisation: Optimisation = Optimisation()
    engine: Engine = Engine()
