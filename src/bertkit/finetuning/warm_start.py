"""Fine-tuning from a fine-tuned model: the encoder is kept, and also the head if the task's labels are among its own.

Phang et al. 2018, STILTs, arXiv:1811.01088 (supplementary training on an intermediate task, then the target task); Liu
et al. 2019, RoBERTa, arXiv:1907.11692, section 5.1 (RTE, STS-B and MRPC start from the model of MNLI). Labels are
matched by name, never by number or order. The task that a model was trained on is read from its run. Checkpoints from
elsewhere are not checked here; their head is refused if its labels are not the task's (data.py).
"""

from __future__ import annotations

import logging
from pathlib import Path

from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.models.files.hub import read_config
from bertkit.models.files.model_files import is_model
from bertkit.models.labels import Labels
from bertkit.recipe.resolve import load_any
from bertkit.run.directory import RECIPE, RECORD, RunDirectory
from bertkit.tasks.spec import TaskSpec

log = logging.getLogger(__name__)

_OF_TASKS = ("finetune", "distill")
"""Kinds of runs whose recipes can have tasks."""


def recipe_of(directory: Path) -> FinetuneRecipe | None:
    """The recipe of the fine-tuning run that produced a model directory; None if there is none.

    For the directory of one task's head from a run of several tasks: the recipe of that task.
    """
    directory = directory.resolve()
    recipe = run_recipe(directory.parent)
    if recipe is not None:
        return recipe
    recipe = run_recipe(directory.parent.parent)
    return None if recipe is None else next((e for e in recipe.alone if e.spec.name == directory.name), None)


def run_recipe(run: Path) -> FinetuneRecipe | None:
    """The recipe of a fine-tuning run or a distillation on tasks; None if the directory is not such a run."""
    if not (run / RECORD).is_file() or RunDirectory.open(run).record["kind"] not in _OF_TASKS:
        return None
    recipe = load_any(str(run / RECIPE))
    return recipe if isinstance(recipe, FinetuneRecipe) else None


def head_directory(directory: Path, task: str) -> Path:
    """For a model of several tasks, the directory with this task's head; else the directory itself."""
    own = directory / task
    return own if is_model(own) else directory


def with_start(recipe: FinetuneRecipe, labels: tuple[str, ...] | None, directory: Path) -> FinetuneRecipe:
    """The recipe, with `new_head` set (and logged) if it starts from a run on another task whose head does not fit.

    Args:
        recipe: of one task.
        labels: the task's; None if it has none.
        directory: of the model.
    """
    source = recipe_of(directory)
    if recipe.new_head or source is None:
        return recipe
    spec, learnt = recipe.spec, source.specs
    names = " and ".join(each.name for each in learnt)
    if len(learnt) > 1 or learnt[0].head != spec.head:
        log.info("%s: keeping the encoder of the run on %s; the head for %s is new", directory, names, spec.name)
        return recipe
    if learnt[0].name == spec.name and isinstance(recipe.task, str):
        return recipe
    misfit = _misfit(learnt[0], spec, labels, directory)
    if misfit is None:
        log.info("%s: keeping encoder and head of the run on %s", directory, names)
        return recipe
    log.info(
        "%s: keeping the encoder of the run on %s; the head for %s is new: %s", directory, names, spec.name, misfit
    )
    return recipe.model_copy(update={"new_head": True})


def _misfit(learnt: TaskSpec, spec: TaskSpec, labels: tuple[str, ...] | None, directory: Path) -> str | None:
    """Why the head of one task cannot be used for another; None if it can."""
    if learnt.kind != spec.kind:
        return f"that of the run is for {learnt.kind}"
    if labels is None:
        return None
    _, contents = read_config(directory)
    here = Labels.from_hub(contents).names
    if not {name.casefold() for name in here} >= {name.casefold() for name in labels}:
        return f"its labels were {', '.join(here)}"
    if learnt.name != spec.name and all(name.isdigit() for name in here):
        return f"labels like {', '.join(here)} may not mean the same"
    return None
