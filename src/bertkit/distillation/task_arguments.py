"""What a user asks of distillation on a task, and what it comes to: a recipe, its data, and what trains.

Nothing here follows a paper. It is fine-tuning's request (finetuning/request.py) with teachers, a student, a control
and a run that goes before; finetuning/suite.py carries it out, seeds, grid, resuming and the choice included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bertkit.distillation.student_settings import GivenModel
from bertkit.distillation.task_data import DistillationData, prepare_distillation
from bertkit.distillation.task_recipe import DistillRecipe, load_distill_recipe, recipe_before, resolved_distillation
from bertkit.distillation.task_trainer import Distilling, share
from bertkit.errors import UsageError
from bertkit.finetuning.arguments import FinetuneArguments, absolute
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.recipe import FinetuneRecipe, changed
from bertkit.finetuning.trainer import Finetuner
from bertkit.metrics.statistics import summarise
from bertkit.models.bilstm import BilstmStudent
from bertkit.progress import Progress, silent_progress
from bertkit.run.directory import RunDirectory


@dataclass(frozen=True)
class DistillArguments(FinetuneArguments):
    """What the user asked for.

    Attributes:
        teachers: models to learn from, in place of the recipe's.
        student: the model that learns, in place of the recipe's.
        control: the same student without its teacher.
        progress: the display, for what is prepared.
    """

    teachers: Sequence[str] = ()
    student: str | None = None
    control: bool = False
    progress: Progress = silent_progress

    kind: ClassVar[str] = "distill"

    @property
    def names_nothing(self) -> bool:
        return super().names_nothing and not (self.teachers or self.student or self.control)

    def load(self, name: str) -> DistillRecipe:
        return load_distill_recipe(name)

    def requested(self) -> DistillRecipe:
        if self.recipe is None:
            raise UsageError("give a RECIPE that says how the student learns, such as distil-task")
        return self.completed(self.load(self.recipe))

    def completed(self, recipe: DistillRecipe) -> DistillRecipe:
        """The recipe with everything that the command line changes in it, resolved.

        Raises:
            UsageError: all faults at once.
        """
        recipe = self.with_data(recipe)
        teachers = tuple(absolute(teacher) for teacher in self.teachers)
        update: dict[str, Any] = {"teacher": teachers[0] if len(teachers) == 1 else teachers} if teachers else {}
        if self.student is not None:
            update["student"] = GivenModel(model=absolute(self.student))
        if self.control:
            update["control"] = True
        recipe = changed(recipe.model_copy(update=update), list(self.overrides))
        return resolved_distillation(self.with_seed(recipe))

    def before(self, recipe: FinetuneRecipe) -> DistillRecipe | None:
        assert isinstance(recipe, DistillRecipe)
        before = recipe_before(recipe)
        return None if before is None else resolved_distillation(before)

    def draws_data(self, recipe: FinetuneRecipe) -> bool:
        assert isinstance(recipe, DistillRecipe)
        return super().draws_data(recipe) or isinstance(recipe.student, BilstmStudent)

    def prepare(self, recipe: FinetuneRecipe) -> DistillationData:
        assert isinstance(recipe, DistillRecipe)
        return prepare_distillation(recipe, cache=self.cache, offline=self.offline, progress=self.progress)

    def trainer(
        self, recipe: FinetuneRecipe, prepared: Sequence[Prepared], run: RunDirectory, start: Path | None
    ) -> Finetuner:
        (taught,) = prepared
        assert isinstance(recipe, DistillRecipe)
        assert isinstance(taught, DistillationData)
        return Distilling(recipe, taught, run, cache=self.cache, start=start)

    def summary(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The teacher beside the mean of the students."""
        first = results[0]
        retained = {
            split: {
                name: _mean_share([each["splits"][split].get(name) for each in results], score)
                for name, score in own.items()
            }
            for split, own in first["teacher"]["splits"].items()
        }
        return {**{key: first[key] for key in ("teacher", "student", "control")}, "retained": retained}


def _mean_share(scores: Sequence[float | None], teacher: float | None) -> float | None:
    """The students' mean score as a share of their teacher's."""
    return share(summarise(dict(enumerate(scores))).as_json()["mean"], teacher)
