"""Settings of generation, which are the options of `bertkit generate`; no torch is imported here.

Each method reads some of them; a setting that is given but not read by the method is refused.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from bertkit.errors import UsageError
from bertkit.settings import Settings

Method = Literal[
    "greedy",
    "sample",
    "beam",
    "gibbs",
    "metropolis-hastings",
    "left-to-right",
    "parallel",
    "mask-predict",
    "diffusion",
]

CAUSAL_METHODS = ("greedy", "sample", "beam")
USUAL_BEAM, USUAL_POWER = 4, 0.6
"""Default for a model that reads a source: Vaswani et al. 2017, section 6.1."""
USUAL_NEW_TOKENS = 64
LEAST_TEMPERATURE = 1e-30
"""With a lower one the logits are infinite."""
_EVERY = ("method", "max_new_tokens", "seed")
_DRAWING = ("temperature", "top_k", "top_p", "samples")
_READS: dict[str, tuple[str, ...]] = {
    "greedy": (*_EVERY, "stop"),
    "sample": (*_EVERY, *_DRAWING, "stop"),
    "beam": (*_EVERY, "samples", "beam", "length_penalty", "penalty", "stop"),
    "gibbs": (*_EVERY, *_DRAWING, "iterations", "burn_in"),
    "metropolis-hastings": (*_EVERY, *_DRAWING, "iterations", "energy"),
    "left-to-right": (*_EVERY, *_DRAWING),
    "parallel": (*_EVERY, *_DRAWING, "iterations"),
    "mask-predict": (*_EVERY, "iterations"),
    "diffusion": (*_EVERY, *_DRAWING, "iterations", "block_length"),
}
"""The settings that each method reads."""

USUAL_ITERATIONS = {"gibbs": 500, "metropolis-hastings": 20, "parallel": 20, "mask-predict": 10, "diffusion": 64}
"""Defaults of `iterations`: Wang and Cho's 500 positions; sweeps over all positions; Mask-Predict's 10."""
BURN_IN_SHARE = 0.5
"""Default of `burn_in` as a share of Gibbs sampling's iterations: Wang and Cho's 250 of 500."""


class GenerationSettings(Settings):
    """How text is generated."""

    method: Method | None = Field(
        None,
        description="How tokens are chosen (default: for a causal model beam if --beam is given, else sample; for a"
        " masked model gibbs; for an encoder-decoder beam).",
    )
    max_new_tokens: int | None = Field(
        None,
        ge=1,
        le=60_000,
        description="Maximum number of new tokens; for a masked model, the exact number of masks after the prompt"
        " (default: 64, or 50 more than the source has).",
    )
    samples: int = Field(
        1, ge=1, le=10_000, description="Number of outputs per prompt; with a beam search, the best ones."
    )
    temperature: float = Field(
        1.0,
        ge=0,
        le=100,
        description="Temperature: the logits are divided by it before a token is drawn; values below 1 favour likely"
        " tokens.",
    )
    top_k: int | None = Field(None, ge=1, description="Draw from the K most probable tokens only (default: all).")
    top_p: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Draw from the fewest most probable tokens whose probabilities add up to this (default: all).",
    )
    beam: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="Beam width of a beam search (default: --samples; for an encoder-decoder, at least 4).",
    )
    length_penalty: float | None = Field(
        None,
        ge=-10,
        le=10,
        description="Beams are ranked by their log-probability divided by their length to this power; values above 0"
        " favour longer outputs (default: 1, or 0.6 with --penalty gnmt).",
    )
    penalty: Literal["length", "gnmt"] | None = Field(
        None,
        description="What is raised to the power of --length-penalty: the length, or (5 + length) / 6 as in GNMT and"
        " the Transformer (default: length, or gnmt for an encoder-decoder).",
    )
    stop: list[str] = Field(default_factory=list, description="Stop an output when this text appears.")
    iterations: int | None = Field(
        None,
        ge=1,
        le=60_000,
        description="For a masked model: number of positions drawn (gibbs, default 500), of sweeps over all"
        " positions (metropolis-hastings and parallel, 20), of rounds (mask-predict, 10) or of steps (diffusion, 64).",
    )
    burn_in: int | None = Field(
        None,
        ge=0,
        description="Number of gibbs iterations before top-k and top-p restrict the draws (default: half of all"
        " iterations).",
    )
    energy: Literal["normalised", "raw"] = Field(
        "normalised",
        description="Scores that metropolis-hastings samples from: sums of log-probabilities (normalised), or of"
        " logits (raw).",
    )
    block_length: int | None = Field(
        None,
        ge=1,
        description="Number of masks that diffusion fills as a block before it moves on to the next block (default:"
        " all).",
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="Seed for all random draws.")

    @field_validator("temperature")
    @classmethod
    def _logits_are_finite(cls, value: float) -> float:
        if value < LEAST_TEMPERATURE:
            raise ValueError(f"{value:g} is too low to draw tokens; --method greedy takes the most probable ones")
        return value

    def resolved(self, *, is_causal: bool, reads_source: bool = False) -> GenerationSettings:
        """The same settings with the method filled in.

        Args:
            is_causal: whether the model predicts the next token; decides the method if none is given.
            reads_source: whether it is an encoder-decoder, which has its own defaults.

        Raises:
            UsageError: a setting has no effect with this method.
        """
        usual: Method = ("sample" if self.beam is None else "beam") if is_causal else "gibbs"
        usual = "beam" if reads_source else usual
        method = usual if self.method is None else self.method
        if reads_source and method not in CAUSAL_METHODS:
            raise UsageError(
                f"--method {method} fills masks, but the model writes the target of a source; take"
                f" {', '.join(CAUSAL_METHODS)}"
            )
        reads = _READS[method]
        fields = type(self).model_fields
        for name, value in self:
            if name not in reads and value != fields[name].get_default(call_default_factory=True):
                readers = ", ".join(each for each, names in _READS.items() if name in names)
                raise UsageError(
                    f"--{name.replace('_', '-')} has no effect with --method {method}; it works with {readers}"
                )
        if method == "beam" and self.beam is not None and self.samples > self.beam:
            raise UsageError(
                f"--samples {self.samples}: a beam of {self.beam} has no more outputs than that; raise --beam"
            )
        if method == "gibbs" and self.burn_in is not None and self.top_k is self.top_p is None:
            raise UsageError(
                "--burn-in has no effect without --top-k or --top-p, which it delays; give one of them or leave it out"
            )
        changes: dict[str, object] = {"method": method}
        if method == "beam":
            changes["beam"] = max(self.beam or (USUAL_BEAM if reads_source else 1), self.samples)
        if method == "beam" and reads_source:
            changes["penalty"] = self.penalty or "gnmt"
        return self.model_copy(update=changes)

    @property
    def new_tokens(self) -> int:
        """Number of new tokens for a model without a source."""
        return USUAL_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    @property
    def beams(self) -> int:
        """Width of the beam; 1 without beam search."""
        return self.beam or 1

    @property
    def penalty_form(self) -> Literal["length", "gnmt"]:
        """See `penalty`."""
        return self.penalty or "length"

    @property
    def length_power(self) -> float:
        """See `length_penalty`."""
        usual = USUAL_POWER if self.penalty_form == "gnmt" else 1.0
        return usual if self.length_penalty is None else self.length_penalty

    @property
    def rounds(self) -> int:
        """The number of iterations of this method."""
        assert self.method is not None
        return USUAL_ITERATIONS[self.method] if self.iterations is None else self.iterations

    @property
    def burn_in_iterations(self) -> int:
        """Number of gibbs iterations that draw from the whole distribution."""
        return round(BURN_IN_SHARE * self.rounds) if self.burn_in is None else self.burn_in
