"""The arguments of distillation on a task: a recipe, its data, and its trainer.

Not from a paper. They are fine-tuning's arguments plus teachers, a student, a control and a preceding run;
finetuning/run.py executes it, with seeds, grid and resuming.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from bertkit.distillation.plan import planned_task_teacher
from bertkit.distillation.student_settings import GivenModel
from bertkit.distillation.task import TaskDistiller, retained
from bertkit.distillation.task_data import DistillationData, prepare_distillation
from bertkit.distillation.task_recipe import (
    DistillRecipe,
    load_distill_recipe,
    parts_of,
    recipe_before,
    resolved_distillation,
)
from bertkit.finetuning.arguments import FinetuneArguments, PlannedRun, absolute
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.own_data import with_split_hash
from bertkit.finetuning.recipe import FinetuneRecipe, changed
from bertkit.finetuning.trainer import Finetuner
from bertkit.metrics.statistics import summarise
from bertkit.models.families.bilstm import BilstmStudent
from bertkit.progress import Progress, silent_progress
from bertkit.recipe.unread import Part
from bertkit.run.directory import RunDirectory
from bertkit.training.plan import PlannedTeacher


@dataclass(frozen=True)
class DistillArguments(FinetuneArguments):
    """The command line's arguments.

    Attributes:
        teachers: teacher models, instead of the recipe's.
        student: the model to train, instead of the recipe's.
        control: train the same student without its teacher.
        progress: the progress display for the preparation.
    """

    teachers: Sequence[str] = ()
    student: str | None = None
    control: bool = False
    progress: Progress = silent_progress

    kind: ClassVar[str] = "distill"

    def for_worker(self) -> Self:
        return replace(self, progress=silent_progress)

    @property
    def uses_recorded_recipe(self) -> bool:
        return super().uses_recorded_recipe and not (self.teachers or self.student or self.control)

    def load(self, name: str) -> DistillRecipe:
        return load_distill_recipe(name)

    def requested(self) -> DistillRecipe:
        if self.recipe is None:
            raise self.unnamed("no recipe given; name one for training the student, such as distil-task")
        return self.completed(self.load(self.recipe))

    def completed(self, recipe: DistillRecipe) -> DistillRecipe:
        """The recipe with all changes of the command line, resolved.

        Raises:
            UsageError: all errors at once.
        """
        recipe = self.with_data(recipe)
        teachers = tuple(absolute(teacher) for teacher in self.teachers)
        update: dict[str, Any] = {"teacher": teachers[0] if len(teachers) == 1 else teachers} if teachers else {}
        if self.student is not None:
            update["student"] = GivenModel(model=absolute(self.student))
        if self.control:
            update["control"] = True
        recipe = changed(recipe.model_copy(update=update), list(self.overrides))
        return with_split_hash(resolved_distillation(self.with_seed(recipe)), offline=self.offline)

    def before(self, recipe: FinetuneRecipe) -> DistillRecipe | None:
        assert isinstance(recipe, DistillRecipe)
        before = recipe_before(recipe)
        return None if before is None else resolved_distillation(before)

    def parts(self, recipe: FinetuneRecipe) -> Sequence[Part]:
        assert isinstance(recipe, DistillRecipe)
        return parts_of(recipe)

    def data_depends_on_seed(self, recipe: FinetuneRecipe) -> bool:
        assert isinstance(recipe, DistillRecipe)
        return super().data_depends_on_seed(recipe) or isinstance(recipe.student, BilstmStudent)

    def prepare(self, recipe: FinetuneRecipe) -> DistillationData:
        assert isinstance(recipe, DistillRecipe)
        return prepare_distillation(recipe, cache=self.cache, offline=self.offline, progress=self.progress)

    def trainer(
        self, recipe: FinetuneRecipe, prepared: Sequence[Prepared], run: RunDirectory, start: Path | None
    ) -> Finetuner:
        (taught,) = prepared
        assert isinstance(recipe, DistillRecipe)
        assert isinstance(taught, DistillationData)
        return TaskDistiller(recipe, taught, run, cache=self.cache, start=start)

    def planned_teacher(self, runs: Sequence[PlannedRun]) -> PlannedTeacher | None:
        return planned_task_teacher(runs)

    def summary(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The teacher's scores and the mean of the students'."""
        first = results[0]
        teacher = {
            split: {name: _teachers_mean(results, split, name) for name in own}
            for split, own in first["teacher"]["splits"].items()
        }
        shares = {
            split: {
                name: retained(name, _mean([each["splits"][split].get(name) for each in results]), score)
                for name, score in own.items()
            }
            for split, own in teacher.items()
        }
        found = {key: first[key] for key in ("student", "control")}
        return {"teacher": first["teacher"] | {"splits": teacher}, **found, "retained": shares}


def _teachers_mean(results: Sequence[Mapping[str, Any]], split: str, name: str) -> float | None:
    """A score of the teacher: the mean over the folds of a cross-validation, between which it differs."""
    scores = [each["teacher"]["splits"][split].get(name) for each in results]
    first: float | None = scores[0]
    return first if all(score == first for score in scores) else _mean(scores)


def _mean(scores: Sequence[float | None]) -> float | None:
    mean: float | None = summarise(dict(enumerate(scores)))["mean"]
    return mean
