"""Learning-rate schedules: functions from the step number to the learning rate.

Devlin et al. 2019, BERT, and Clark et al. 2020, ELECTRA, arXiv:2003.10555 (as in the released optimization.py of each);
Loshchilov and Hutter 2017, arXiv:1608.03983 (cosine); Vaswani et al. 2017, arXiv:1706.03762, section 5.3
(inverse-sqrt); Hu et al. 2024, arXiv:2404.06395, section 4 (warmup-stable-decay); Hägele et al. 2024, arXiv:2405.18392
(1-sqrt). A schedule is defined by its settings; step numbers count updates from 0.

The rise to the peak over w updates follows each schedule's source: step / w (bert, electra, mobilebert), (step + 1) / w
(inverse-sqrt, whose steps count from 1), and (step + 1) / (w + 1) for all others, which do not start at zero and reach
the peak only once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bertkit.settings import Settings, UnreadKey

_FINE_STEPS = 1 << 30
"""Number of steps into which a schedule by time is divided: fine enough that one step is negligible."""


class Schedule(Settings):
    """A learning rate for every step: a linear rise to the peak, then `after_warmup`."""

    peak: float | None = Field(None, gt=0, description="Peak learning rate.")
    warmup_steps: int | None = Field(
        None, ge=0, description="Updates over which the learning rate rises from zero to the peak."
    )
    warmup_share: float | None = Field(
        None, ge=0, lt=1, description="Warm-up as a share of the run's updates, in place of warmup_steps."
    )

    total_steps: int | None = Field(
        None,
        ge=1,
        description="Number of updates that the schedule is laid out for, if the run or stage ends earlier; null: as"
        " many as the run or stage has.",
    )

    clock: Literal["updates", "sequences", "time"] = Field(
        "updates",
        description="What the schedule's progress is measured in: the run's updates, the sequences read (a growing"
        " batch reads more of them in later updates), or the hours that the run has.",
    )
    hours: float | None = Field(
        None, gt=0, description="With clock: time, hours after which the run ends, whatever steps are left."
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"clock", "hours", "total_steps"})
    ends: ClassVar[bool] = True
    """Whether the learning rate depends on how many updates there are."""

    def dumped(self, fields: dict[str, Any], *, every_field: bool) -> dict[str, Any]:
        shown = super().dumped(fields, every_field=every_field)
        return {key: value for key, value in shown.items() if value is not None or not key.startswith("warmup_")}

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.total_steps is not None and not self.ends:
            raise ValueError("total_steps has no effect on a schedule without an end; leave it out")
        return self

    @model_validator(mode="after")
    def _clock_fits(self) -> Self:
        if (self.hours is not None) != (self.clock == "time"):
            raise ValueError("hours and clock: time need each other; give both, or neither")
        if self.clock != "updates" and (self.warmup_steps or self.total_steps is not None):
            raise ValueError(
                f"clock: {self.clock}, but warmup_steps and total_steps are counted in updates; write warmup_share, and"
                " leave total_steps out"
            )
        return self

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_share is not None:
            raise ValueError("warmup_steps and warmup_share exclude each other; leave one of them out, or set null")
        return self

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        steps = recipe.optimisation.steps
        if self.total_steps is not None and steps is not None and self.total_steps < steps:
            yield UnreadKey("total_steps", f"the run or stage is longer: {steps:,} updates")

    def learning_rate(self, step: float, steps: int) -> float:
        """The learning rate of update number `step` (from 0) of `steps`; a fraction if another clock is used."""
        assert self.peak is not None
        steps = max(steps, self.total_steps or 0)
        return self.at(step, steps, self.peak, self.warmup(steps))

    def at_progress(self, progress: float) -> float:
        """The learning rate after a share of the whole, by another clock than the number of updates."""
        return self.learning_rate(progress * _FINE_STEPS, _FINE_STEPS)

    def at(self, step: float, steps: int, peak: float, warmup: int) -> float:
        """The learning rate with this peak and this many warm-up updates."""
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        return self.after_warmup(step, steps, peak, warmup)

    def after_warmup(self, step: float, steps: int, peak: float, warmup: int) -> float:
        """The same, for steps after the warm-up."""
        return peak

    def warmup(self, steps: int) -> int:
        """Updates of the warm-up in a run of `steps`."""
        if self.warmup_share:
            return min(math.ceil(self.warmup_share * steps), steps - 1)
        return self.warmup_steps or 0


class BertSchedule(Schedule):
    """Linear, with the decay counted from step 0, as released: after w of N warm-up steps it is peak * (1 - w/N).

    During warm-up it is peak * step / w, so 0 at the first update.
    """

    name: Literal["bert"] = "bert"

    def at(self, step: float, steps: int, peak: float, warmup: int) -> float:
        return peak * step / warmup if step < warmup else peak * (1 - step / steps)


class ElectraSchedule(Schedule):
    """Linear, with the decay counted from step 0 and the warm-up multiplied onto it, as released with ELECTRA.

    Unlike BERT's it has no jump: it rises to peak * (1 - w/N) at the end of the warm-up of w of N steps.
    """

    name: Literal["electra"] = "electra"

    def at(self, step: float, steps: int, peak: float, warmup: int) -> float:
        warmed_up = min(1.0, step / warmup) if warmup else 1.0
        return peak * (1 - step / steps) * warmed_up


class MobileBertSchedule(Schedule):
    """Peak * min(step / w, 0.9 + 0.1 sqrt(1 - step / N)): the curve of each phase of MobileBERT's transfer.

    As released (Sun et al. 2020, arXiv:2004.02984, distill_util.py), where a phase's warm-up w is a tenth of its N
    updates.
    """

    name: Literal["mobilebert"] = "mobilebert"

    def at(self, step: float, steps: int, peak: float, warmup: int) -> float:
        return peak * min(step / warmup if warmup else 1.0, 0.9 + 0.1 * math.sqrt(1 - step / steps))


class LinearSchedule(Schedule):
    """Linear rise to the peak, then linear fall to zero from the end of the warm-up."""

    name: Literal["linear"] = "linear"

    def after_warmup(self, step: float, steps: int, peak: float, warmup: int) -> float:
        return peak * (steps - step) / max(1, steps - warmup)


class CosineSchedule(Schedule):
    """Linear rise, then half a cosine down to `floor` times the peak."""

    name: Literal["cosine"] = "cosine"
    floor: float = Field(0.0, ge=0, le=1, description="Final learning rate as a share of the peak.")

    def after_warmup(self, step: float, steps: int, peak: float, warmup: int) -> float:
        return peak * (self.floor + (1 - self.floor) * _cosine(_progress(step, steps, warmup)))


class ConstantSchedule(Schedule):
    """Linear rise, then the peak."""

    name: Literal["constant"] = "constant"
    ends: ClassVar[bool] = False

    def at(self, step: float, steps: int, peak: float, warmup: int) -> float:
        return peak * min(1.0, (step + 1) / (warmup + 1))


class PolynomialSchedule(Schedule):
    """Linear rise, then (1 - progress)^power down to `floor` times the peak."""

    name: Literal["polynomial"] = "polynomial"
    power: float = Field(1.0, gt=0, description="Exponent of the decay; 1: linear; 3: Longformer's, steep at first.")
    floor: float = Field(0.0, ge=0, le=1, description="Final learning rate as a share of the peak.")

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from super().unread_keys(recipe)
        if self.floor == 1:
            yield UnreadKey("power", "schedule.floor is 1: the learning rate stays at its peak")
            if self.warmup_share is None:
                yield UnreadKey("total_steps", "the learning rate stays at its peak for any length of the schedule")

    def after_warmup(self, step: float, steps: int, peak: float, warmup: int) -> float:
        return peak * (self.floor + (1 - self.floor) * math.pow(1 - _progress(step, steps, warmup), self.power))


class InverseSqrtSchedule(Schedule):
    """Linear rise over w updates, then peak * sqrt(w / n) at the n-th: the Transformer's, also called Noam's.

    With a model of width D its peak is 1 / sqrt(D w). It does not depend on the length of the run.
    """

    name: Literal["inverse-sqrt"] = "inverse-sqrt"
    ends: ClassVar[bool] = False

    @model_validator(mode="after")
    def _warmed_up(self) -> InverseSqrtSchedule:
        if not self.warmup_share and (self.warmup_steps or 0) < 1:
            raise ValueError(
                f"schedule inverse-sqrt needs warmup_steps of at least 1, got {self.warmup_steps or 0}: the learning"
                " rate after the warm-up is peak * sqrt(warmup_steps / step); Vaswani et al. took 4000"
            )
        return self

    def at(self, step: float, steps: int, peak: float, warmup: int) -> float:
        number, warmup = step + 1, max(1, warmup)  # a run of one update is too short for a warm-up
        return peak * min(number / warmup, math.sqrt(warmup / number))


class TriangleSchedule(Schedule):
    """Rise from `start` times the peak to the peak, then fall to zero in the last part: cramming's triangle2.

    Geiping and Goldstein 2022, arXiv:2212.14034 (schedulers.py): peak * min(start + p (1 - start) / (1 - fall),
    (1 - p) / fall) at the progress p. It has no warm-up.
    """

    name: Literal["triangle"] = "triangle"
    start: float = Field(0.25, ge=0, le=1, description="Learning rate of the first update as a share of the peak.")
    fall: float = Field(
        0.25, gt=0, lt=1, description="Share of the run, at its end, over which the learning rate falls."
    )

    @model_validator(mode="after")
    def _without_warmup(self) -> Self:
        if self.warmup_steps or self.warmup_share:
            raise ValueError("schedule triangle has no warm-up; leave warmup_steps and warmup_share out")
        return self

    def at(self, step: float, steps: int, peak: float, warmup: int) -> float:
        progress = step / steps
        return peak * min(self.start + progress * (1 - self.start) / (1 - self.fall), (1 - progress) / self.fall)


class WarmupStableDecaySchedule(Schedule):
    """Linear rise, the peak for most of the run, then a decay to `floor` times the peak.

    A trapezoid: another decay can start from any checkpoint of the stable part. ModernBERT's decay is 1-sqrt.
    """

    name: Literal["warmup-stable-decay"] = "warmup-stable-decay"
    stable_share: float = Field(
        0.9, ge=0, le=1, description="Share of the steps after the warm-up that are at the peak."
    )
    decay: Literal["1-sqrt", "linear", "cosine"] = Field("1-sqrt", description="The shape of the decay.")
    floor: float = Field(0.0, ge=0, le=1, description="Final learning rate as a share of the peak.")

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from super().unread_keys(recipe)
        if self.warmup_share is None and 1 in (self.stable_share, self.floor):
            yield UnreadKey("total_steps", "the learning rate stays at its peak for any length of the schedule")
        if self.stable_share == 1:
            why = "schedule.stable_share is 1: there is no decay"
            yield UnreadKey("decay", why)
            yield UnreadKey("floor", why)
        elif self.floor == 1:
            why = "schedule.floor is 1: the learning rate stays at its peak"
            yield UnreadKey("decay", why)
            yield UnreadKey("stable_share", why)

    def after_warmup(self, step: float, steps: int, peak: float, warmup: int) -> float:
        decay_start = warmup + round(self.stable_share * (steps - warmup))
        if step < decay_start:
            return peak
        progress = _progress(step, steps, decay_start)
        return peak * (self.floor + (1 - self.floor) * _DECAYS[self.decay](progress))


def _progress(step: float, steps: int, start: int) -> float:
    """The share of the steps after `start` that is done."""
    return (step - start) / max(1, steps - start)


def _cosine(progress: float) -> float:
    """Half a cosine, from 1 at progress 0 to 0 at 1."""
    return (1 + math.cos(math.pi * progress)) / 2


_DECAYS: dict[str, Callable[[float], float]] = {
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
    "linear": lambda progress: 1 - progress,
    "cosine": _cosine,
}

_Schedule = (
    BertSchedule
    | ElectraSchedule
    | MobileBertSchedule
    | LinearSchedule
    | CosineSchedule
    | PolynomialSchedule
    | ConstantSchedule
    | InverseSqrtSchedule
    | TriangleSchedule
    | WarmupStableDecaySchedule
)
AnySchedule = Annotated[_Schedule, Field(discriminator="name")]
