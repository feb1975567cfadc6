"""`probe structure`: structural probes of distance and depth (Hewitt and Manning 2019, NAACL)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from bertkit.probing import LEAST_SENTENCES, ProbeSettings
from bertkit.settings import Settings


class ProbeTraining(Settings):
    """How a structural probe is trained: by Adam, the learning rate cut by ten after every epoch without gain on
    the held-out loss."""

    max_epochs: int = Field(40, ge=1, description="Maximum number of training epochs of each probe.")
    patience_epochs: int = Field(5, ge=1, description="Stop after this many epochs without an improvement of 1e-4.")
    learning_rate: float = Field(
        5e-3, gt=0, description="Initial learning rate of Adam; the paper uses 1e-3, on 40,000 trees."
    )
    batch_sentences: int = Field(20, ge=1, description="Sentences per batch.")


class StructureSettings(ProbeSettings):
    """Probe for dependency trees, as distances and depths, layer by layer:
    `bertkit probe structure --model M --data t.conllu`"""

    kind: ClassVar[str] = "structure"

    sentences: int = Field(
        2000,
        ge=LEAST_SENTENCES,
        description="Number of training sentences, drawn at random; a tenth of them decides when to stop.",
    )
    test_sentences: int = Field(500, ge=1, description="Number of test sentences, drawn at random.")
    rank: int = Field(64, ge=1, description="Rank of the probes in all layers; at most the model's width.")
    ranks: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list, description="Rank to try on the best layer (default: powers of two up to --rank)."
    )
    training: ProbeTraining = Field(default_factory=ProbeTraining, description="How each probe is trained.")
