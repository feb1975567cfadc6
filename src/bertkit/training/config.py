"""The optimisation noun of a recipe of any kind, and the interface that the trainer needs.

Not from a paper. Optimisation determines the result and is hashed; the engine (engine_config.py) determines speed and
reporting, and is not hashed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import BeforeValidator, Field, model_validator

from bertkit.settings import Settings, UnreadKey
from bertkit.training.batch_ramp import BatchRamp, BatchSizes
from bertkit.training.divergence import RollBack, SpikeGuard
from bertkit.training.engine_config import EngineConfig as EngineConfig
from bertkit.training.optimizers import OptimizerOrNone
from bertkit.training.rates import RateGroup
from bertkit.training.schedules import AnySchedule, LinearSchedule


class StageConfig(Settings):
    """A part of the run with some different settings."""

    share: float = Field(gt=0, le=1, description="Share of the run's steps that this stage takes.")
    set: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings that differ in this stage, by dotted key, such as data.sequence_length: 128. Allowed"
        " are all of objective; all of data except its text; model.num_hidden_layers and the rope_theta of rotary"
        " positions; optimisation.batch_sequences, batch_ramp, schedule and groups.",
    )
    new_moments: bool = Field(
        False, description="Start with the optimiser's running means at zero, as a separate run does."
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"new_moments"})


def _linear_unless_named(schedule: Any) -> Any:
    return {"name": "linear", **schedule} if isinstance(schedule, dict) else schedule


class OptimisationConfig(Settings):
    """How the weights are trained. Settings left out get the command's default: a fixed one in pretraining, the
    published setting for a task."""

    optimizer: OptimizerOrNone = Field(None, description="The optimiser (default: adamw).")
    schedule: Annotated[AnySchedule, BeforeValidator(_linear_unless_named)] = Field(
        default_factory=LinearSchedule, description="Learning-rate schedule; linear if no name is given."
    )
    batch_sequences: int | None = Field(
        None, ge=1, description="Sequences, or examples of a task, per update, over all micro-batches and ranks."
    )
    batch_ramp: BatchRamp | None = Field(
        None, description="On text: smaller batches in the run's first updates; null: none."
    )
    steps: int | None = Field(
        None,
        ge=1,
        description="Number of updates; on a task the maximum, and the schedule ends with them unless it has"
        " total_steps.",
    )
    epochs: float | None = Field(None, gt=0, description="On a task: number of passes over the training examples.")
    stages: list[StageConfig] = Field(
        default_factory=list, description="Stages of the run, in order; their shares sum to 1."
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay of an exponential moving average of the weights, which is evaluated and saved in place of"
        " the last weights; null: no average.",
    )
    groups: list[RateGroup] = Field(
        default_factory=list,
        description="Parameters with a learning rate of their own, or frozen; if several groups name a parameter,"
        " the first one applies.",
    )
    layer_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="On a task: factor of the learning rate from one layer to the layer below it, from the head down.",
    )
    evaluations_per_epoch: int = Field(1, ge=1, description="On a task: number of evaluations on dev per epoch.")
    early_stopping: int | None = Field(
        None,
        ge=1,
        description="On a task: stop after this many consecutive evaluations on dev without a better score; null:"
        " never.",
    )
    select: Literal["last", "best"] | None = Field(
        None,
        description="On a task: evaluation whose weights are kept, the last or the best on dev; null: the best with"
        " early stopping, else the last.",
    )
    task_smoothing: float = Field(
        1.0,
        ge=0,
        le=1,
        description="S: several tasks get updates in proportion to (number of their batches)^S; 1: in proportion, 0:"
        " equally many.",
    )
    max_nonfinite_steps: int = Field(
        3,
        ge=0,
        description="Number of consecutive updates that may be skipped because the loss or the gradient is not"
        " finite; one more ends the run with exit code 4, or goes back as set by roll_back.",
    )
    roll_back: RollBack | None = Field(
        None,
        description="If updates are not finite, continue from the last checkpoint with a lower learning rate; null:"
        " never.",
    )
    spikes: SpikeGuard | None = Field(
        None, description="Detect updates whose loss is far above its running mean; null: off."
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"batch_ramp", "ema", "groups", "roll_back", "spikes"})

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        warmup = self.schedule.warmup_steps
        if warmup is not None and self.steps is not None and warmup >= self.steps:
            raise ValueError(
                f"schedule.warmup_steps ({warmup}) must be below steps ({self.steps}); for runs of several lengths,"
                " write schedule.warmup_share instead, such as 0.05"
            )
        if self.batch_ramp is not None and self.batch_sequences is not None:
            self.batch_ramp.smaller(self.batch_sequences)
        total = sum(stage.share for stage in self.stages)
        if self.stages and abs(total - 1) > 1e-6:
            raise ValueError(f"the shares of stages sum to {total:g}; they must sum to 1")
        if self.stages and self.stages[0].new_moments:
            raise ValueError("stages.0.new_moments: every run starts with new moments; leave it out")
        if self.steps is not None and len(self.stages) > self.steps:
            raise ValueError(f"{len(self.stages)} stages need as many steps or more, not {self.steps}")
        if self.spikes is not None and self.spikes.response == "roll_back" and self.roll_back is None:
            raise ValueError("spikes.response: roll_back needs the key roll_back; write roll_back: {} for its defaults")
        if self.early_stopping is not None and self.select == "last":
            raise ValueError("early_stopping needs select: best, because the last evaluation is not the best one")
        return self

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        batches_differ = self.batch_ramp is not None or any(
            "batch" in key for stage in self.stages for key in stage.set
        )
        if self.schedule.clock == "sequences" and not batches_differ:
            why = "all batches have equally many sequences, so counting them is counting updates"
            yield UnreadKey("schedule.clock", why, "write clock: updates, or let batches grow (batch_ramp)")
        if hasattr(recipe, "task") and not isinstance(recipe.task, tuple):
            yield UnreadKey("task_smoothing", "there is one task", "give several tasks")
        if getattr(getattr(recipe, "method", None), "trains_head_alone", False):
            why = f"method.name {recipe.method.name} trains only the head, which has the full learning rate"
            yield UnreadKey("layer_decay", why, "choose another method")

    def batch_sizes(self) -> BatchSizes:
        """Number of sequences in each update of the run."""
        assert self.batch_sequences is not None
        assert self.steps is not None
        return BatchSizes(self.batch_sequences, self.steps, self.batch_ramp)

    @property
    def keeps_best(self) -> bool:
        """Whether the result is the weights of the best evaluation."""
        return self.select == "best" or (self.select is None and self.early_stopping is not None)

    @property
    def average_bytes(self) -> int:
        """Bytes per parameter that the average of the weights takes, in memory and in a checkpoint."""
        return 0 if self.ema is None else 4

    def stage_ends(self) -> list[int]:
        """The step after each stage's last; every stage has at least one."""
        assert self.steps is not None
        ends = [0]
        for number in range(1, len(self.stages)):
            end = round(sum(stage.share for stage in self.stages[:number]) * self.steps)
            ends.append(min(max(end, ends[-1] + 1), self.steps - len(self.stages) + number))
        return [*ends[1:], self.steps]


class TrainingRecipe(Protocol):
    """What the trainer needs from a recipe of any kind."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def optimisation(self) -> OptimisationConfig: ...
    @property
    def engine(self) -> EngineConfig: ...
