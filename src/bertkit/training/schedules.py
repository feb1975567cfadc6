"""Learning-rate schedules: the step number in, the rate out.

Devlin et al. 2019, BERT (as in the released optimization.py); Loshchilov and Hutter 2017, arXiv:1608.03983 (cosine). A
schedule is its own settings; a step's number counts updates from 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, Literal

from pydantic import Field

from bertkit.settings import Settings


class Schedule(Settings, ABC):
    """A rate for every step."""

    peak: float = Field(gt=0, description="The highest learning rate.")
    warmup_steps: int = Field(0, ge=0, description="Updates over which the rate rises from zero to the peak.")

    @abstractmethod
    def rate(self, step: int, steps: int) -> float:
        """The learning rate of update number `step` (from 0) of `steps`."""


class BertSchedule(Schedule):
    """Linear, with the decay counted from step 0, as released: after warm-up of w of N steps the rate is at 1 - w/N.

    During warm-up the rate is peak * step / w, so the very first update has rate 0.
    """

    name: Literal["bert"] = "bert"

    def rate(self, step: int, steps: int) -> float:
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        return self.peak * (1 - step / steps)


class LinearSchedule(Schedule):
    """Linear rise to the peak, then linear fall to zero from the end of the warm-up."""

    name: Literal["linear"] = "linear"

    def rate(self, step: int, steps: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        return self.peak * (steps - step) / max(1, steps - self.warmup_steps)


class CosineSchedule(Schedule):
    """Linear rise, then half a cosine down to `floor` times the peak."""

    name: Literal["cosine"] = "cosine"
    floor: float = Field(0.0, ge=0, le=1, description="Share of the peak at which the rate ends.")

    def rate(self, step: int, steps: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return self.peak * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2)


class ConstantSchedule(Schedule):
    """Linear rise, then the peak."""

    name: Literal["constant"] = "constant"

    def rate(self, step: int, steps: int) -> float:
        return self.peak * min(1.0, (step + 1) / (self.warmup_steps + 1))


AnySchedule = Annotated[BertSchedule | LinearSchedule | CosineSchedule | ConstantSchedule, Field(discriminator="name")]
