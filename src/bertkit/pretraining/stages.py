"""The stages of a run: the same recipe with some settings changed for a share of the steps.

The example is Devlin et al. 2019, BERT, appendix A.2: 90% of the steps at 128 tokens, the rest at 512. A stage can
change the data, the objectives, the batch, the number of layers (see models/conversion/convert.py), rotary positions,
the learning rates of parameters and the schedule, which then counts the stage's own steps. Each stage is validated like
a recipe of its own before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bertkit.data.layouts.lanes import LaneLayout
from bertkit.errors import UsageError
from bertkit.objectives.forward import takes_over
from bertkit.pretraining.recipe import Recipe
from bertkit.recipe.resolve import overrides_of, with_overrides
from bertkit.recipe.unread import Part, is_within
from bertkit.training.batch_ramp import BatchSizes

_MAY_CHANGE = (
    "data",
    "objective",
    "model.num_hidden_layers",
    "model.global_rope_theta",
    "model.local_rope_theta",
    "optimisation.batch_sequences",
    "optimisation.batch_ramp",
    "optimisation.schedule",
    "optimisation.groups",
)
_SAME_TEXT = ("sources", "languages", "reading", "deduplicate", "held_out", "held_out_tokens")
"""Keys of data that all stages share: no stage may train on what another one holds out."""
_OF_THE_RUN = ("max_epochs", "max_words")
"""Keys of data that limit the whole run."""
_SCHEDULE = "optimisation.schedule"


@dataclass(frozen=True)
class Stage:
    """A range of steps and the recipe that applies to it.

    Attributes:
        number: from 0.
        first_step, end_step: its steps, `end_step` excluded.
        recipe: with the stage's settings applied.
        own_schedule: whether the learning rate follows the stage's own schedule, over its own steps.
        new_moments: whether it begins with a new optimiser.
        sequences_before, run_sequences: sequences of the preceding stages, and of the whole run.
    """

    number: int
    first_step: int
    end_step: int
    recipe: Recipe
    own_schedule: bool = False
    new_moments: bool = False
    sequences_before: int = 0
    run_sequences: int = 0

    def learning_rate(self, step: int) -> float:
        """The learning rate of the run's update number `step`, from 0; by time, as if all updates took equally long."""
        schedule = self.recipe.optimisation.schedule
        first, steps = (self.first_step, self.end_step - self.first_step) if self.own_schedule else (0, self.run_steps)
        if schedule.clock == "updates":
            return schedule.learning_rate(step - first, steps)
        if schedule.clock == "time":
            return schedule.at_progress((step - first) / steps)
        read, whole = self.sequences(self.first_step, step), self.sequences()
        if not self.own_schedule:
            read, whole = self.sequences_before + read, self.run_sequences
        return schedule.at_progress(read / whole)

    @property
    def run_steps(self) -> int:
        """Updates of the whole run."""
        return self.recipe.optimisation.steps

    @cached_property
    def batch_sizes(self) -> BatchSizes:
        """Sequences of the run's updates, according to this stage."""
        return self.recipe.optimisation.batch_sizes()

    def sequences(self, first: int | None = None, end: int | None = None) -> int:
        """Sequences read by the run's updates from `first` up to `end`, excluded; without them, all of the stage's."""
        sizes = self.batch_sizes
        return sizes.before(self.end_step if end is None else end) - sizes.before(
            self.first_step if first is None else first
        )


def stages_of(recipe: Recipe) -> list[Stage]:
    """The stages of a recipe in order; a single one for the whole run if the recipe has none.

    Raises:
        UsageError: a stage changes what cannot change inside a run, has errors, or needs a preceding stage.
    """
    stages: list[Stage] = []
    first = 0
    configs = recipe.optimisation.stages
    for number, end in enumerate(recipe.optimisation.stage_ends()):
        changes = configs[number].set if configs else {}
        for key, value in changes.items():
            if key == "data" and isinstance(value, dict):
                names = ", ".join(f"data.{name}" for name in value) or "data.KEY"
                raise UsageError(f"optimisation.stages.{number}.set: write the keys of data with dots: {names}")
            if not any(is_within(key, allowed) for allowed in _MAY_CHANGE):
                raise UsageError(
                    f"optimisation.stages.{number}.set: {key} cannot change inside a run;"
                    f" only {', '.join(_MAY_CHANGE)} can"
                )
        own_schedule = any(is_within(key, _SCHEDULE) for key in changes)
        staged = with_overrides(recipe, overrides_of(changes))
        for key in _SAME_TEXT:
            if getattr(staged.data, key) != getattr(recipe.data, key):
                raise UsageError(
                    f"optimisation.stages.{number}.set: data.{key} cannot change inside a run: all stages read the same"
                    " text; continue on other text in a separate run, with --init"
                )
        _check_generator(recipe, stages[-1].recipe if stages else None, staged, number)
        stages.append(Stage(number, first, end, staged, own_schedule, bool(configs) and configs[number].new_moments))
        first = end
    whole = [stage.sequences() for stage in stages]
    return [replace(stage, sequences_before=sum(whole[: stage.number]), run_sequences=sum(whole)) for stage in stages]


def check_limits(recipe: Recipe) -> None:
    """Raise UsageError if a stage of a new run sets a limit of the whole run, which nothing reads there."""
    for number, stage in enumerate(recipe.optimisation.stages):
        for key in _OF_THE_RUN:
            if f"data.{key}" in stage.set:
                raise UsageError(
                    f"optimisation.stages.{number}.set: data.{key} limits the whole run, and nothing reads it in a"
                    " stage; set it in the recipe's own data section"
                )


def multi_rank_obstacle(stages: Sequence[Stage]) -> str | None:
    """Why several ranks cannot share the updates of these stages; None if they can."""
    for stage in stages:
        if isinstance(layout := stage.recipe.data.layout, LaneLayout):
            return f"data.layout {layout.choice} continues texts across batches, with state in a single process"
    return None


def parts_of(recipe: Recipe) -> list[Part]:
    """Each stage as a part of the run, with the length of its schedule."""
    parts = []
    for stage in stages_of(recipe):
        own, changes = stage.recipe, tuple[str, ...]()
        if stage.own_schedule:
            steps = {"steps": stage.end_step - stage.first_step}
            own = own.model_copy(update={"optimisation": own.optimisation.model_copy(update=steps)})
        if recipe.optimisation.stages:
            changes = tuple(recipe.optimisation.stages[stage.number].set)
        parts.append(Part(own, changes, f"optimisation.stages.{stage.number}.set"))
    return parts


def _check_generator(recipe: Recipe, before: Recipe | None, staged: Recipe, number: int) -> None:
    """Raise UsageError if the model would start from a companion that was not trained."""
    leader = takes_over(staged.objectives)
    if leader is None:
        return
    if before is None or all(objective.learnt_by != leader.companion for objective in before.objectives):
        where = f"optimisation.stages.{number}: " if recipe.optimisation.stages else ""
        raise UsageError(
            f"{where}objective.{leader.term}.training is two-stage, but there is no generator yet to take weights from;"
            " put a stage with `objective: [masked_lm]` before it"
        )
