"""Decides whether a model can be evaluated on a task directly, or must be fine-tuned first.

Not from a paper. A head counts as the task's own if its run or its config.json names the task, or if its labels have
the task's names; never by the number or order of labels. If this is unclear, the user has to decide.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from bertkit.errors import DataError, UsageError
from bertkit.finetuning.data import has_head
from bertkit.finetuning.warm_start import head_directory, recipe_of
from bertkit.models.files.hub import read_config
from bertkit.models.labels import Labels
from bertkit.tasks.catalogue import TASKS, TaskSpec, find_task
from bertkit.tasks.classification import has_vector_head

log = logging.getLogger(__name__)

HeadChoice = Literal["auto", "own", "new"]
"""For models with a head: decide by its names, evaluate it directly, or fine-tune with a new one."""
HeadUse = Literal["own", "new", "none"]
"""Evaluate the existing head; fine-tune in spite of it; fine-tune because there is none."""

_REMEDY = "give --head new to fine-tune with a new head, or --head own if its labels are named like the task's"


def head_use(directory: Path, spec: TaskSpec, choice: HeadChoice, *, name: str) -> HeadUse:
    """What to do with the model's head.

    Args:
        directory: the model's directory.
        spec: the task.
        choice: the user's choice.
        name: the model's name, for messages.

    Raises:
        DataError: it is unclear whether the head is the task's, or `own` was chosen and there is no head.
    """
    directory = head_directory(directory, spec.name)
    config, contents = read_config(directory)
    if not has_head(config, contents, spec.head) and not (spec.kind == "classification" and has_vector_head(contents)):
        if choice == "own":
            raise DataError(f"{name}: has no head for {spec.kind}, which --head own needs")
        return "none"
    if choice != "auto":
        return choice
    task = _learnt(directory, contents)
    if task is not None:
        return _choice(task.name == spec.name, name, spec, f"its head is of {task.name}")
    if spec.kind in ("span", "choice"):
        return "own"
    return _by_labels(contents, spec, name)


def _learnt(directory: Path, contents: Mapping[str, Any]) -> TaskSpec | None:
    """The published task that the model was fine-tuned on, if its run or config.json names it."""
    recipe = recipe_of(directory)
    named = contents.get("finetuning_task") if recipe is None else recipe.task
    if not isinstance(named, str):
        return None
    try:
        return find_task(named)
    except UsageError:
        return None


def _by_labels(contents: Mapping[str, Any], spec: TaskSpec, name: str) -> HeadUse:
    labels = Labels.from_hub(contents)
    is_number = labels.count == 1 or contents.get("problem_type") == "regression"
    if spec.kind == "regression" or is_number:
        return _choice(spec.kind == "regression" and is_number, name, spec, f"its head has {labels.count} outputs")
    here = _folded(labels.names)
    if labels.are_named and not all(each.isdigit() for each in here):
        like = [each.name for each in TASKS.values() if here in _names_of(each)]
        if spec.name in like:
            like.remove(spec.name)
            if like:
                log.warning(
                    "%s: its record names no task; its head's labels are those of %s, and also of %s:"
                    " --head new fine-tunes with a new head",
                    *(name, spec.name, ", ".join(like)),
                )
            return "own"
        if like:
            return _choice(False, name, spec, f"its head's labels are those of {like[0]}")
    raise DataError(
        f"{name}: its head's labels are {', '.join(labels.names)}, so it is unclear whether it is one of {spec.name}"
        f" ({', '.join(spec.labels or ()) or 'without fixed labels'}); {_REMEDY}"
    )


def _names_of(spec: TaskSpec) -> list[set[str]]:
    """The names of a task's labels in its own files, and in its copy on the Hub."""
    found = [spec.labels or (), tuple(spec.hub.names) if spec.hub else ()]
    return [_folded(names) for names in found if names]


def _choice(own: bool, name: str, spec: TaskSpec, reason: str) -> HeadUse:
    if own:
        return "own"
    log.info("%s: %s; it is fine-tuned on %s with a new head", name, reason, spec.name)
    return "new"


def _folded(names: tuple[str, ...]) -> set[str]:
    return {name.casefold() for name in names}
