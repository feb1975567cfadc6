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
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from bertkit.settings import Settings


class Schedule(Settings, ABC):
    """A rate for every step."""

    peak: float | None = Field(None, gt=0, description="The highest learning rate.")
    warmup_steps: int | None = Field(
        None, ge=0, description="Updates over which the learning rate rises from zero to the peak."
    )
    warmup_share: float | None = Field(
        None, ge=0, lt=1, description="The same as a share of the run's updates, in place of warmup_steps."
    )

    @model_serializer(mode="wrap")
    def _with_one_warmup(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {
            key: value for key, value in handler(self).items() if value is not None or not key.startswith("warmup_")
        }

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_share is not None:
            raise ValueError("warmup_steps and warmup_share exclude each other; leave one of them out, or null")
        return self

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of update number `step` (from 0) of `steps`."""
        assert self.peak is not None
        return self.at(step, steps, self.peak, self.warmup(steps))

    @abstractmethod
    def at(self, step: int, steps: int, peak: float, warmup: int) -> float:
        """The learning rate with this peak and so many updates of warm-up."""

    def warmup(self, steps: int) -> int:
        """Updates of the warm-up in a run of `steps`."""
        if self.warmup_share:
            return min(math.ceil(self.warmup_share * steps), steps - 1)
        return self.warmup_steps or 0


class BertSchedule(Schedule):
    """Linear, with the decay counted from step 0, as released: after warm-up of w of N steps the rate is at 1 - w/N.

    During warm-up the rate is peak * step / w, so the very first update has rate 0.
    """

    name: Literal["bert"] = "bert"

    def at(self, step: int, steps: int, peak: float, warmup: int) -> float:
        if step < warmup:
            return peak * step / warmup
        return peak * (1 - step / steps)


class ElectraSchedule(Schedule):
    """Linear, with the decay counted from step 0 and the warm-up multiplied onto it, as ELECTRA released it.

    Unlike BERT's it has no jump: it comes to peak * (1 - w/N) at the end of the warm-up of w of N steps from below.
    """

    name: Literal["electra"] = "electra"

    def at(self, step: int, steps: int, peak: float, warmup: int) -> float:
        warmed_up = min(1.0, step / warmup) if warmup else 1.0
        return peak * (1 - step / steps) * warmed_up


class LinearSchedule(Schedule):
    """Linear rise to the peak, then linear fall to zero from the end of the warm-up."""

    name: Literal["linear"] = "linear"

    def at(self, step: int, steps: int, peak: float, warmup: int) -> float:
        if step < warmup:
            return _rising(step, peak, warmup)
        return peak * (steps - step) / max(1, steps - warmup)


class CosineSchedule(Schedule):
    """Linear rise, then half a cosine down to `floor` times the peak."""

    name: Literal["cosine"] = "cosine"
    floor: float = Field(0.0, ge=0, le=1, description="Share of the peak at which the rate ends.")

    def at(self, step: int, steps: int, peak: float, warmup: int) -> float:
        if step < warmup:
            return _rising(step, peak, warmup)
        return peak * (self.floor + (1 - self.floor) * _cosine(_progress(step, steps, warmup)))


class ConstantSchedule(Schedule):
    """Linear rise, then the peak."""

    name: Literal["constant"] = "constant"

    def at(self, step: int, steps: int, peak: float, warmup: int) -> float:
        return peak * min(1.0, (step + 1) / (warmup + 1))


class PolynomialSchedule(Schedule):
    """Linear rise, then (1 - progress)^power down to `floor` times the peak, from the end of the warm-up."""

    name: Literal["polynomial"] = "polynomial"
    power: float = Field(1.0, gt=0, description="Exponent of the fall; 1: linear, Longformer's 3 falls steeply first.")
    floor: float = Field(0.0, ge=0, le=1, description="Share of the peak at which the rate ends.")

    def at(self, step: int, steps: int, peak: float, warmup: int) -> float:
        if step < warmup:
            return _rising(step, peak, warmup)
        return peak * (self.floor + (1 - self.floor) * math.pow(1 - _progress(step, steps, warmup), self.power))


class InverseSqrtSchedule(Schedule):
    """Linear rise over w updates, then peak * sqrt(w / n) at the n-th: the Transformer's, also called Noam's.

    With a model of width D its peak is 1 / sqrt(D w). It does not depend on the length of the run.
    """

    name: Literal["inverse-sqrt"] = "inverse-sqrt"

    @model_validator(mode="after")
    def _warmed_up(self) -> InverseSqrtSchedule:
        if not self.warmup_share and (self.warmup_steps or 0) < 1:
            raise ValueError(
                f"schedule inverse-sqrt needs warmup_steps of at least 1, got {self.warmup_steps or 0}: the rate"
                " behind the warm-up is peak * sqrt(warmup_steps / step); Vaswani et al. took 4000"
            )
        return self

    def at(self, step: int, steps: int, peak: float, warmup: int) -> float:
        number = step + 1
        return peak * min(number / warmup, math.sqrt(warmup / number))


class WarmupStableDecaySchedule(Schedule):
    """Linear rise, the peak for most of the run, then a fall to `floor` times the peak.

    A trapezoid: any checkpoint of the stable part can be the start of another fall. ModernBERT's falls by 1-sqrt.
    """

    name: Literal["warmup-stable-decay"] = "warmup-stable-decay"
    stable_share: float = Field(
        0.9,
        ge=0,
        le=1,
        description="Share of the steps after the warm-up that are at the peak.",
    )
    decay: Literal["1-sqrt", "linear", "cosine"] = Field("1-sqrt", description="The shape of the fall.")
    floor: float = Field(0.0, ge=0, le=1, description="Share of the peak at which the rate ends.")

    def at(self, step: int, steps: int, peak: float, warmup: int) -> float:
        if step < warmup:
            return _rising(step, peak, warmup)
        falls_from = warmup + round(self.stable_share * (steps - warmup))
        if step < falls_from:
            return peak
        progress = (step - falls_from) / max(1, steps - falls_from)
        return peak * (self.floor + (1 - self.floor) * _FALLS[self.decay](progress))


def _rising(step: int, peak: float, warmup: int) -> float:
    """The learning rate within the warm-up: a line that reaches the peak right after it."""
    return peak * (step + 1) / (warmup + 1)


def _progress(step: int, steps: int, warmup: int) -> float:
    """The share of the run after the warm-up that is over."""
    return (step - warmup) / max(1, steps - warmup)


def _cosine(progress: float) -> float:
    """Half a cosine, from 1 at progress 0 to 0 at 1."""
    return (1 + math.cos(math.pi * progress)) / 2


_FALLS: dict[str, Callable[[float], float]] = {
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
    "linear": lambda progress: 1 - progress,
    "cosine": _cosine,
}

_Schedule = (
    BertSchedule
    | ElectraSchedule
    | LinearSchedule
    | CosineSchedule
    | PolynomialSchedule
    | ConstantSchedule
    | InverseSqrtSchedule
    | WarmupStableDecaySchedule
)
AnySchedule = Annotated[_Schedule, Field(discriminator="name")]
