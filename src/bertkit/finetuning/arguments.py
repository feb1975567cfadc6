"""The command line of fine-tuning, and its recipe, data and trainer.

Distillation on a task has more options (distillation/task_arguments.py); sibling run.py trains.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from bertkit.errors import DataError
from bertkit.finetuning.data import Prepared, has_head, prepare
from bertkit.finetuning.inputs import CustomTask, TaskEntry
from bertkit.finetuning.own_data import with_split_hash
from bertkit.finetuning.recipe import (
    AnyRecipe,
    FinetuneRecipe,
    changed,
    load_finetune_recipe,
    load_own_task,
    own_spec,
    resolved,
)
from bertkit.finetuning.trainer import Finetuner
from bertkit.models.files.hub import read_config
from bertkit.run.directory import RECIPE, RunDirectory
from bertkit.tasks.readers.hub_table import PREFIX
from bertkit.tasks.spec import LONGEST_NAME
from bertkit.training.plan import PlannedTeacher
from bertkit.training.run import RunArguments

log = logging.getLogger(__name__)

_UNNAMED = "unnamed"
"""The name of a recipe until it is named after its task and model."""
_READ = {
    *(
        "name",
        "task",
        "model",
        "new_head",
        "data",
        "text",
        "tagging",
        "span",
        "choice",
        "embedding",
        "causal",
        "dropout",
    ),
    *("teacher", "student", "transfer", "augmentation"),
}
"""Keys of a recipe that determine how the data are read; the last ones are for distillation."""


@dataclass(frozen=True)
class PlannedRun:
    """A run whose cost is estimated: its recipe, the data of its tasks, and how many epochs it trains."""

    recipe: FinetuneRecipe
    prepared: Sequence[Prepared]
    epochs: float


@dataclass(frozen=True)
class FinetuneArguments(RunArguments[FinetuneRecipe]):
    """The command line of fine-tuning, or of distillation on a task; keys of overrides may be short (`lr`).

    Attributes:
        task: a published task, a task YAML, or the user's own data, in place of the recipe's; several: all of them
            with one encoder.
        model: initial model, in place of the recipe's.
        data_dir: folder of the task's files, in place of the recipe's.
        seeds: one run per seed; empty: the recipe's.
        grid: the values to try for each key, as written, or a range of them.
        trials: how many settings are drawn from the grid; None: all combinations.
        default_model: initial model if neither the command line nor the recipe names one.
    """

    task: TaskEntry | Sequence[TaskEntry] | None = None
    model: str | None = None
    data_dir: str | None = None
    seeds: Sequence[int] = ()
    grid: Mapping[str, Sequence[str]] = field(default_factory=dict)
    trials: int | None = None
    default_model: str | None = None

    kind: ClassVar[str] = "finetune"

    @property
    def uses_recorded_recipe(self) -> bool:
        return self.recipe is None and self.task is None

    def load(self, name: str) -> FinetuneRecipe:
        """The recipe of that name or path."""
        return load_finetune_recipe(name)

    def recorded(self, run: RunDirectory) -> FinetuneRecipe:
        return self.load(str(run.path / RECIPE))

    def changed(self, recorded: FinetuneRecipe) -> FinetuneRecipe:
        update = {} if self.model is None else {"model": absolute(self.model)}
        return changed(self.with_data(recorded).model_copy(update=update), list(self.overrides))

    def with_seed(self, recipe: AnyRecipe) -> AnyRecipe:
        """The recipe with the first of `seeds`."""
        return recipe.model_copy(update={"seed": self.seeds[0]}) if self.seeds else recipe

    def requested(self) -> FinetuneRecipe:
        """The recipe with all changes from the command line, resolved.

        Raises:
            UsageError: all errors at once.
        """
        if self.recipe is not None:
            recipe = self.load(self.recipe)
        elif self.task is None:
            raise self.unnamed(
                "give a RECIPE, --task TASK, or --train F --dev F (or --split 0.1) with the columns of your own data"
            )
        else:
            recipe = FinetuneRecipe(name=_UNNAMED)
        recipe = self.changed(recipe)
        if recipe.model is None and self.default_model is not None:
            recipe = recipe.model_copy(update={"model": absolute(self.default_model)})
        if recipe.name == _UNNAMED:
            recipe = recipe.model_copy(update={"name": _name_of(_entries(recipe.task), recipe.model)})
        return with_split_hash(resolved(self.with_seed(recipe)), offline=self.offline)

    def with_data(self, recipe: AnyRecipe) -> AnyRecipe:
        """The recipe with the command line's task and folder."""
        given = _entries(self.task, like=recipe)
        update: dict[str, Any] = {"task": given[0] if len(given) == 1 else given} if given else {}
        if self.data_dir is not None:
            update["data"] = recipe.data.model_copy(update={"directory": absolute(self.data_dir)})
        return recipe.model_copy(update=update)

    def before(self, recipe: FinetuneRecipe) -> FinetuneRecipe | None:
        """The recipe of a separate run whose model this one starts from; None if there is none."""
        return None

    def data_depends_on_seed(self, recipe: FinetuneRecipe) -> bool:
        """Whether the data depend on the seed, as with a sample of the examples."""
        return recipe.data.train_examples is not None

    def data_key(self, recipe: FinetuneRecipe) -> str:
        """Equal for recipes whose data are the same."""
        parts = recipe.model_dump(mode="json", include=_READ)
        parts["head_on_vectors"] = recipe.method.name == "setfit"  # its task has another head
        return json.dumps([parts, recipe.seed if self.data_depends_on_seed(recipe) else None], sort_keys=True)

    def prepare(self, recipe: FinetuneRecipe) -> Prepared:
        """The data of a recipe of one task.

        Raises:
            DataError: data or model are missing or do not fit.
        """
        first = recipe.model or ""
        if self.model is None and first.startswith("./runs/") and not Path(first).exists():
            raise DataError(
                f"model {first}: does not exist; {recipe.name} starts with the model of an earlier run: train that one"
                f" first (with --run-dir {first.removeprefix('./')}), or give another model with --model"
            )
        prepared = prepare(recipe, offline=self.offline)
        config, contents = read_config(prepared.model_directory)
        if recipe.new_head and not has_head(config, contents, prepared.spec.head):
            log.warning(
                "new_head (true) has no effect: %s has no head for %s, so a new one is initialised in any case",
                recipe.model,
                prepared.spec.name,
            )
        return prepared

    def trainer(
        self, recipe: FinetuneRecipe, prepared: Sequence[Prepared], run: RunDirectory, start: Path | None
    ) -> Finetuner:
        """The trainer of a run.

        Args:
            recipe: resolved.
            prepared: the data of its tasks.
            run: the directory.
            start: the model of the run `before`.
        """
        return Finetuner(recipe, prepared, run)

    def planned_teacher(self, runs: Sequence[PlannedRun]) -> PlannedTeacher | None:
        """What a teacher adds to the cost of these runs; None without a teacher."""
        return None

    def for_worker(self) -> Self:
        """These arguments, to be sent to another process."""
        return self

    def summary(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Further keys of a suite's results.json, from the runs of the chosen setting."""
        return {}


def _entries(
    given: TaskEntry | Sequence[TaskEntry] | None, *, like: FinetuneRecipe | None = None
) -> tuple[TaskEntry, ...]:
    """The tasks on the command line; files have their full paths and, unless they name a kind, that of a recipe's
    task."""
    if given is None:
        return ()
    entries = (given,) if isinstance(given, str | CustomTask) else tuple(given)
    read = [
        load_own_task(Path(each)) if isinstance(each, str) and each.endswith((".yaml", ".yml")) else each
        for each in entries
    ]
    kinds = {spec.kind for spec in like.specs} if like is not None and like.task is not None else set()
    kind = {"kind": kinds.pop()} if len(kinds) == 1 else {}
    return tuple(
        _absolute_files(each if "kind" in each.model_fields_set else each.model_copy(update=kind))
        if isinstance(each, CustomTask)
        else each
        for each in read
    )


def _name_of(tasks: Sequence[TaskEntry], model: str | None) -> str:
    """The default name of a recipe: from the tasks (or the training file) and the model."""
    first = "+".join(own_spec(each).name if isinstance(each, CustomTask) else each for each in tasks)
    last = "" if model is None else Path(model.rstrip("/")).name.partition("@")[0]
    if last == "model":
        last = Path(model or "").resolve().parent.name
    name = "-".join(part for part in (first, last) if part)
    return "".join(each if each.isalnum() or each in "_.+-" else "-" for each in name[:LONGEST_NAME])


def _absolute_files(task: CustomTask) -> CustomTask:
    names = ("train", "test") if task.dev_task is not None else ("train", "dev", "test")
    files = {split: getattr(task, split) for split in names}
    own = {split: file for split, file in files.items() if file is not None and not file.startswith(PREFIX)}
    found = {split: str(Path(file).expanduser().absolute()) for split, file in own.items()}
    return task.model_copy(update=found)


def absolute(path: str) -> str:
    """A directory's full path, so that the recorded recipe can be run from any directory; a Hub id unchanged."""
    return str(Path(path).expanduser().absolute()) if Path(path).expanduser().exists() else path
