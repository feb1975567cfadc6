"""Plans an evaluation on published tasks: which tasks have data, how the model's head is used, recipes.

Not from a paper. Everything is decided before any training. Sibling tasks.py executes the plan, cost.py estimates what
it costs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.own_head import HeadChoice, HeadUse, head_use
from bertkit.evaluation.run import EvalArguments
from bertkit.files import json_sha256, sha256_of
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.data import watched_splits
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.jobs.settings import ExecutorSettings
from bertkit.metrics.modules import AdditionalMetric, load_metric
from bertkit.models.files.hub import read_config
from bertkit.models.files.model_files import encoder_directory, find_model
from bertkit.recipe.hashing import what_hash
from bertkit.recipe.resolve import Override
from bertkit.tasks.catalogue import TaskSpec
from bertkit.tasks.published import PublishedModel, published_for, published_named
from bertkit.tasks.readers import load_split
from bertkit.tasks.readers.find import find_files

log = logging.getLogger(__name__)

MISMATCHED = "mnli-mm"
"""The half of MNLI's dev set that papers report in a separate column."""
NO_ROWS = "none"


@dataclass(frozen=True)
class TaskEvaluation:
    """What to evaluate.

    Attributes:
        suite: name of the suite.
        tasks: the tasks, in the order of the table.
        arguments: the model, and where to compute and write.
        data_dir: where the official files are; the Hub's copies if None.
        seeds: one fine-tuning run per seed.
        hyperparameters: overrides for every task's recipe, from options that are refused if nothing is fine-tuned; keys
            may be short (`lr`).
        overrides: the same from `--set`, which come later; without effect, they are only reported.
        head: what to do with a head that the model has.
        predict: splits without labels for the best seed to predict, if they exist.
        published: the model whose published rows to show; if None, one with the same shape.
        may_lack: whether tasks without data are left out; else they are an error.
        max_minutes: stop after this time, with a checkpoint.
        metrics: additional metrics to report, see `bertkit.metrics.modules.load_metric`.
        executor: what executes the fine-tuning runs, and how many at a time.
    """

    suite: str
    tasks: tuple[TaskSpec, ...]
    arguments: EvalArguments
    data_dir: Path | None = None
    seeds: tuple[int, ...] = (0,)
    hyperparameters: tuple[Override, ...] = ()
    overrides: tuple[Override, ...] = ()
    head: HeadChoice = "auto"
    predict: tuple[str, ...] = ()
    published: str | None = None
    may_lack: bool = False
    max_minutes: float | None = None
    metrics: tuple[str, ...] = ()
    executor: ExecutorSettings = field(default_factory=ExecutorSettings)

    @property
    def recipe_overrides(self) -> tuple[Override, ...]:
        """All overrides, the later ones with priority."""
        return (*self.hyperparameters, *self.overrides)

    @cached_property
    def additional(self) -> tuple[AdditionalMetric, ...]:
        """The modules of `metrics`.

        Raises:
            DataError: one cannot be loaded.
        """
        return tuple(load_metric(name, offline=self.arguments.offline) for name in self.metrics)


@dataclass(frozen=True)
class PlannedTask:
    """The plan for one task.

    Attributes:
        spec: the task.
        use: use of the model's head.
        watched: the splits that select; scores of the first have plain metric names.
        later: the other splits: predicted, and scored if they have labels; files may be missing.
        files: sha256 of each file read, by its path.
        recipes: recipes by seed; empty if the head is evaluated directly.
    """

    spec: TaskSpec
    use: HeadUse
    watched: tuple[str, ...]
    later: tuple[str, ...]
    files: Mapping[str, str]
    recipes: Mapping[int, FinetuneRecipe]

    @property
    def deciding(self) -> Any:
        """What determines its scores, besides model and data."""
        hashes = {str(seed): what_hash(recipe) for seed, recipe in self.recipes.items()}
        return {"recipes": hashes, "splits": [*self.watched, *self.later]}


@dataclass(frozen=True)
class PlannedEvaluation:
    """The plan for all tasks.

    Attributes:
        directory: of the model.
        published: see `published_rows`.
        tasks: the tasks that can be evaluated.
        left_out: why others cannot.
    """

    directory: Path
    published: list[dict[str, Any]]
    tasks: list[PlannedTask]
    left_out: dict[str, str]

    @classmethod
    def of(cls, evaluation: TaskEvaluation) -> PlannedEvaluation:
        """The plan of an evaluation; warns of tasks that are left out, and of settings without effect.

        Raises:
            UsageError: invalid overrides, hyperparameters without effect, or an unknown published row.
            DataError: invalid model or data, or no task has data.
        """
        directory = encoder_directory(find_model(evaluation.arguments.model, offline=evaluation.arguments.offline))
        rows = published_rows(evaluation, directory)
        planned, left_out = plan_tasks(evaluation, directory)
        for name, reason in left_out.items():
            log.warning("%s is left out: %s", name, reason)
        found = cls(directory, rows, planned, left_out)
        if len(found.evaluated_as_is) < len(planned):
            return found
        if evaluation.hyperparameters:
            given = [each.place for each in evaluation.hyperparameters]
            has = "has" if len(given) == 1 else "have"
            raise UsageError(
                f"{', '.join(given)}: {has} no effect: {evaluation.arguments.model} has its own head, which is"
                " evaluated as it is; leave out what only fine-tuning reads, or fine-tune a new head with --head new"
            )
        if evaluation.overrides or len(evaluation.seeds) > 1:
            log.warning(
                "settings and seeds of fine-tuning have no effect: %s has its own head, which is evaluated as it is;"
                " --head new fine-tunes a new one",
                evaluation.arguments.model,
            )
        return found

    @property
    def evaluated_as_is(self) -> list[str]:
        """The tasks that are evaluated with the model's own head, without fine-tuning."""
        return [task.spec.name for task in self.tasks if task.use == "own"]


def plan_tasks(evaluation: TaskEvaluation, directory: Path) -> tuple[list[PlannedTask], dict[str, str]]:
    """The tasks that can be evaluated, and the reasons why others cannot.

    Raises:
        DataError: none can, or a required one cannot, or it is unclear what the head's labels are.
    """
    planned: list[PlannedTask] = []
    left_out: dict[str, str] = {}
    for spec in evaluation.tasks:
        watched = watched_splits(spec)
        use = head_use(directory, spec, evaluation.head, name=evaluation.arguments.model)
        try:
            files = _files(evaluation, spec, watched if use == "own" else ("train", *watched))
        except DataError as error:
            if not evaluation.may_lack:
                raise
            left_out[spec.name] = str(error)
            continue
        later: list[str] = []
        for split in spec.splits:
            if split not in watched and split in (*spec.scored, *evaluation.predict):
                try:
                    files |= _files(evaluation, spec, (split,))
                    later.append(split)
                except DataError as error:
                    log.warning("%s: %s is not predicted: %s", spec.name, split, error)
        recipes = {} if use == "own" else {seed: _recipe(evaluation, spec, use, seed) for seed in evaluation.seeds}
        planned.append(PlannedTask(spec, use, watched, tuple(later), files, recipes))
    if not planned:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in left_out.items())
        raise DataError(f"{evaluation.suite}: no task has its data:\n{reasons}")
    return planned, left_out


def published_rows(evaluation: TaskEvaluation, directory: Path) -> list[dict[str, Any]]:
    """The published rows with scores on these tasks, as fractions; empty if the model has none.

    Raises:
        UsageError: the given name does not exist.
    """
    model = _published(evaluation, directory)
    if model is None:
        return []
    names = {spec.name for spec in evaluation.tasks} | (
        {MISMATCHED} if any(s.name == "mnli" for s in evaluation.tasks) else set()
    )
    rows = []
    for row in model.rows:
        figures = {
            task: {metric: round(value / 100, 6) for metric, value in metrics.items()}
            for task, metrics in row.figures.items()
            if task in names
        }
        if figures:
            rows.append(
                {
                    "name": model.name,
                    "title": model.title,
                    "split": row.split,
                    "figures": figures,
                    "averages": {name: round(value / 100, 6) for name, value in row.averages.items()},
                    "source": row.source,
                    "note": row.note,
                }
            )
    return rows


def _published(evaluation: TaskEvaluation, directory: Path) -> PublishedModel | None:
    if evaluation.published is not None:
        return None if evaluation.published == NO_ROWS else published_named(evaluation.published)
    config, _ = read_config(directory)
    shape = (config.model_type, getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0))
    found = published_for(shape, evaluation.arguments.model)
    if found is not None:
        log.info(
            "published figures are those of %s, which has this shape; --published %s shows none", found.title, NO_ROWS
        )
    return found


def _files(evaluation: TaskEvaluation, spec: TaskSpec, splits: Sequence[str]) -> dict[str, str]:
    """The sha256 of the files that splits are read from, by path.

    Raises:
        DataError: a file is missing.
    """
    if evaluation.data_dir is None:
        sources = [load_split(spec, split, offline=evaluation.arguments.offline).source for split in splits]
        return {source: json_sha256(source) for source in sources}
    paths = [find_files(spec, split, evaluation.data_dir) for split in splits]
    parts = [each for path in paths for each in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return {str(part): sha256_of(part) for part in parts if part.is_file()}


def finetune_arguments(evaluation: TaskEvaluation, spec: TaskSpec, use: HeadUse) -> FinetuneArguments:
    """The arguments of `bertkit finetune` for one task, without a seed."""
    return FinetuneArguments(
        task=spec.name,
        model=evaluation.arguments.model,
        data_dir=None if evaluation.data_dir is None else str(evaluation.data_dir),
        overrides=[
            Override("engine.device", evaluation.arguments.device),
            *(
                [Override("engine.micro_batch_tokens", evaluation.arguments.batch_tokens)]
                if evaluation.arguments.batch_tokens
                else []
            ),
            *([Override("new_head", True)] if use == "new" else []),
            *([Override("metrics", list(evaluation.metrics))] if evaluation.metrics else []),
            *evaluation.recipe_overrides,
        ],
        runs_root=evaluation.arguments.runs_root,
        offline=evaluation.arguments.offline,
        command=evaluation.arguments.command,
    )


def _recipe(evaluation: TaskEvaluation, spec: TaskSpec, use: HeadUse, seed: int) -> FinetuneRecipe:
    request = finetune_arguments(evaluation, spec, use)
    return replace(request, overrides=[*request.overrides, Override("seed", seed)]).requested()
