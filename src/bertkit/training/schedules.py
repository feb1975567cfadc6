"""Learning-rate schedules: the step number in, the rate out.

Devlin et al. 2019, BERT, and Clark et al. 2020, ELECTRA, arXiv:2003.10555 (as in the released optimization.py of each);
Loshchilov and Hutter 2017, arXiv:1608.03983 (cosine); Vaswani et al. 2017, arXiv:1706.03762, section 5.3
(inverse-sqrt); Hu et al. 2024, arXiv:2404.06395, section 4 (warmup-stable-decay); Hägele et al. 2024, arXiv:2405.18392
(1-sqrt). A schedule is its own settings; a step's number counts updates from 0.

Three conventions of the rise to the peak over w updates live here, each as its source has it: step / w (bert, electra),
(step + 1) / w (inverse-sqrt, whose steps count from 1), and (step + 1) / (w + 1) of all others, which neither begin at
zero nor have the peak twice.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from bertkit.settings import Settings


class Schedule(Settings, ABC):
    """A rate for every step."""

    peak: float = Field(gt=0, description="The highest learning rate.")
    warmup_steps: int = Field(0, ge=0, description="Updates over which the rate rises from zero to the peak.")

    @abstractmethod
    def rate(self, step: int, steps: int) -> float:
        """The learning rate of update number `step` (from 0) of `steps`."""

    def _rising(self, step: int) -> float:
        """The rate within the warm-up: a line that reaches the peak right behind it."""
        return self.peak * (step + 1) / (self.warmup_steps + 1)

    def _progress(self, step: int, steps: int) -> float:
        """How much of the run behind the warm-up is over."""
        return (step - self.warmup_steps) / max(1, steps - self.warmup_steps)


class BertSchedule(Schedule):
    """Linear, with the decay counted from step 0, as released: after warm-up of w of N steps the rate is at 1 - w/N.

    During warm-up the rate is peak * step / w, so the very first update has rate 0.
    """

    name: Literal["bert"] = "bert"

    def rate(self, step: int, steps: int) -> float:
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        return self.peak * (1 - step / steps)


class ElectraSchedule(Schedule):
    """Linear, with the decay counted from step 0 and the warm-up multiplied onto it, as ELECTRA released it.

    Unlike BERT's it has no jump: it comes to peak * (1 - w/N) at the end of the warm-up of w of N steps from below.
    """

    name: Literal["electra"] = "electra"

    def rate(self, step: int, steps: int) -> float:
        warmed_up = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return self.peak * (1 - step / steps) * warmed_up


class LinearSchedule(Schedule):
    """Linear rise to the peak, then linear fall to zero from the end of the warm-up."""

    name: Literal["linear"] = "linear"

    def rate(self, step: int, steps: int) -> float:
        if step < self.warmup_steps:
            return self._rising(step)
        return self.peak * (steps - step) / max(1, steps - self.warmup_steps)


class CosineSchedule(Schedule):
    """Linear rise, then half a cosine down to `floor` times the peak."""

    name: Literal["cosine"] = "cosine"
    floor: float = Field(0.0, ge=0, le=1, description="Share of the peak at which the rate ends.")

    def rate(self, step: int, steps: int) -> float:
        if step < self.warmup_steps:
            return self._rising(step)
        return self.peak * (self.floor + (1 - self.floor) * _cosine(self._progress(step, steps)))


class ConstantSchedule(Schedule):
    """Linear rise, then the peak."""

    name: Literal["constant"] = "constant"

    def rate(self, step: int, steps: int) -> float:
        return self.peak * min(1.0, (step + 1) / (self.warmup_steps + 1))


class PolynomialSchedule(Schedule):
    """Linear rise, then (1 - progress)^power down to `floor` times the peak, from the end of the warm-up."""

    name: Literal["polynomial"] = "polynomial"
    power: float = Field(1.0, gt=0, description="Exponent of the fall; 1: linear, Longformer's 3 falls steeply first.")
    floor: float = Field(0.0, ge=0, le=1, description="Share of the peak at which the rate ends.")

    def rate(self, step: int, steps: int) -> float:
        if step < self.warmup_steps:
            return self._rising(step)
        return self.peak * (self.floor + (1 - self.floor) * math.pow(1 - self._progress(step, steps), self.power))


class InverseSqrtSchedule(Schedule):
    """Linear rise over w updates, then peak * sqrt(w / n) at the n-th: the Transformer's, also called Noam's.

    With a model of width D its peak is 1 / sqrt(D w). It does not depend on the length of the run.
    """

    name: Literal["inverse-sqrt"] = "inverse-sqrt"

    @model_validator(mode="after")
    def _warmed_up(self) -> InverseSqrtSchedule:
        if self.warmup_steps < 1:
            raise ValueError(
                f"schedule inverse-sqrt needs warmup_steps of at least 1, got {self.warmup_steps}: the rate behind the"
                " warm-up is peak * sqrt(warmup_steps / step); Vaswani et al. took 4000"
            )
        return self

    def rate(self, step: int, steps: int) -> float:
        number = step + 1
        return self.peak * min(number / self.warmup_steps, math.sqrt(self.warmup_steps / number))


class WarmupStableDecaySchedule(Schedule):
    """Linear rise, the peak for most of the run, then a fall to `floor` times the peak.

    A trapezoid: any checkpoint of the stable part can be the start of another fall. ModernBERT's falls by 1-sqrt.
    """

    name: Literal["warmup-stable-decay"] = "warmup-stable-decay"
    stable_share: float = Field(
        0.9, ge=0, le=1, description="Share of the steps behind the warm-up at which the rate stays at the peak."
    )
    decay: Literal["1-sqrt", "linear", "cosine"] = Field("1-sqrt", description="The shape of the fall.")
    floor: float = Field(0.0, ge=0, le=1, description="Share of the peak at which the rate ends.")

    def rate(self, step: int, steps: int) -> float:
        if step < self.warmup_steps:
            return self._rising(step)
        falls_from = self.warmup_steps + round(self.stable_share * (steps - self.warmup_steps))
        if step < falls_from:
            return self.peak
        progress = (step - falls_from) / max(1, steps - falls_from)
        return self.peak * (self.floor + (1 - self.floor) * _FALLS[self.decay](progress))


def _cosine(progress: float) -> float:
    """Half a cosine, from 1 at progress 0 to 0 at 1."""
    return (1 + math.cos(math.pi * progress)) / 2


_FALLS: dict[str, Callable[[float], float]] = {
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
    "linear": lambda progress: 1 - progress,
    "cosine": _cosine,
}

AnySchedule = Annotated[
    BertSchedule
    | ElectraSchedule
    | LinearSchedule
    | CosineSchedule
    | PolynomialSchedule
    | ConstantSchedule
    | InverseSqrtSchedule
    | WarmupStableDecaySchedule,
    Field(discriminator="name"),
]
