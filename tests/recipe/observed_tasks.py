"""Everything that a tiny run on a task computes, as in observed_runs.py for pretraining: fine-tuning and
distillation."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.recipe.observed_runs import REFUSED, Observed, _given_up_after, digest, weights

from bertkit.distillation.task_arguments import DistillArguments
from bertkit.distillation.task_recipe import DistillRecipe, resolved_distillation
from bertkit.errors import BertkitError
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.recipe import resolved
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.training.run import identity_of

_TIMES = ("_per_s", "seconds", "stall", "memory", "mfu")


class TaskRuns:
    """What fine-tuning and distillation on a task compute; runs go below a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.count = 0

    def observed(self, recipe: Any) -> Observed:
        """The parts, from cheap to expensive; the last one says so if the program refuses the recipe."""
        try:
            yield from self._observed(recipe)
        except BertkitError as error:
            yield f"{REFUSED}: {type(error).__name__}"

    def _observed(self, recipe: Any) -> Observed:
        kind = DistillArguments if isinstance(recipe, DistillRecipe) else FinetuneArguments
        arguments = kind(cache=self.directory / "cache", runs_root=self.directory, offline=True)
        recipe = resolved_distillation(recipe) if isinstance(recipe, DistillRecipe) else resolved(recipe)
        prepared = [arguments.prepare(each) for each in recipe.alone]
        for each in prepared:
            splits = {"train": each.train, **each.others, "teacher": getattr(each, "teacher_train", None)}
            yield digest(
                *(part for name, split in splits.items() if split for part in (name, *_features(split.features)))
            )
        self.count += 1
        path = self.directory / f"run-{self.count}"
        run = RunDirectory.create(self.directory, identity_of(arguments, recipe, {}), path)
        try:
            trainer = arguments.trainer(recipe, prepared, run, None)
            steps = trainer.steps
            yield digest([trainer.learning_rate(step) for step in range(steps)])
            yield digest([trainer.order.task(step) for step in range(steps)])
            yield digest(*(trainer.order.items(step) for step in range(steps)))
            yield weights(trainer.model)
            with run.recording([]):
                results = trainer.train(progress=silent_progress)
            yield _plain([json.loads(line) for line in run.metrics.read_text().splitlines()])
            yield weights(trainer.model)
            yield digest(bool(trainer.best_weights))
            yield _plain({key: value for key, value in results.items() if key not in ("seed", "selected")})
            yield _plain([file.read_text() for file in sorted(path.glob("predictions/*"))])
            if len(prepared) == 1:  # with several tasks, a batch belongs to the step's task
                with trainer.session():
                    yield _given_up_after(trainer, trainer._batches(0))
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _features(features: Any) -> list[Any]:
    """The arrays of a split's features, with their names."""
    found: list[Any] = []
    for each in dataclasses.fields(features):
        value = getattr(features, each.name)
        parts = value.items() if isinstance(value, dict) else [(each.name, value)]
        found += [
            part for name, array in parts if isinstance(array, np.ndarray | torch.Tensor) for part in (name, array)
        ]
    return found


def _plain(value: Any) -> str:
    """A hash of JSON data without measured times."""
    return digest(_timeless(value))


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(key): _timeless(each) for key, each in value.items() if not any(part in str(key) for part in _TIMES)
        }
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_timeless(each) for each in value]
    return value
