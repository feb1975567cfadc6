"""The optimisation noun of a recipe, and the engine.

Optimisation decides the result and is hashed; the engine decides speed and what is reported, and is not. Shared by
every recipe.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from bertkit.settings import Settings
from bertkit.training.engine_config import EngineConfig as EngineConfig
from bertkit.training.optimizers import AdamWConfig, AnyOptimizerConfig
from bertkit.training.schedules import AnySchedule, BertSchedule


class StageConfig(Settings):
    """A part of the run in which some settings differ."""

    share: float = Field(gt=0, le=1, description="Share of the run's steps that this stage takes.")
    set: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings that differ, by dotted key: data.sequence_length: 128. Of objective any; of data any but"
        " its text; model.num_hidden_layers; optimisation.batch_sequences and optimisation.schedule.",
    )


class OptimisationConfig(Settings):
    """How the weights are found."""

    optimizer: AnyOptimizerConfig = Field(default_factory=AdamWConfig, description="The update rule.")
    schedule: AnySchedule = Field(
        default_factory=lambda: BertSchedule(peak=1e-4, warmup_steps=10_000), description="The learning rate by step."
    )
    batch_sequences: int = Field(256, ge=1, description="Sequences per update, over all micro-batches and ranks.")
    steps: int = Field(1_000_000, ge=1, description="Updates.")
    stages: list[StageConfig] = Field(default_factory=list, description="Parts of the run, in order; shares sum to 1.")
    max_nonfinite_steps: int = Field(
        3, ge=0, description="Updates in a row that may be skipped because loss or gradient was not finite."
    )

    @model_validator(mode="after")
    def _consistent(self) -> OptimisationConfig:
        if self.schedule.warmup_steps >= self.steps:
            raise ValueError(f"schedule.warmup_steps ({self.schedule.warmup_steps}) must be below steps ({self.steps})")
        total = sum(stage.share for stage in self.stages)
        if self.stages and abs(total - 1) > 1e-6:
            raise ValueError(f"the shares of stages sum to {total:g}, not 1")
        if len(self.stages) > self.steps:
            raise ValueError(f"{len(self.stages)} stages in {self.steps} steps: a stage ends before it begins")
        return self

    def stage_ends(self) -> list[int]:
        """The step behind each stage's last; every stage has at least one."""
        ends = [0]
        for number in range(1, len(self.stages)):
            end = round(sum(stage.share for stage in self.stages[:number]) * self.steps)
            ends.append(min(max(end, ends[-1] + 1), self.steps - len(self.stages) + number))
        return [*ends[1:], self.steps]
