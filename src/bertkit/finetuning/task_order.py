"""The examples and the task of each update: the batches of all tasks, shuffled in every epoch.

Liu et al. 2019, MT-DNN, arXiv:1901.11504, Algorithm 1: every task is divided into mini-batches, those of all tasks are
merged and shuffled, and each update takes one of them, with the loss of its task. The order of a task's examples is one
permutation per epoch, with or without other tasks.

The tasks' shares may be smoothed like the languages of multilingual BERT (data/languages.py); an epoch has as many
updates as before, so a task with fewer updates than batches reads its examples over several epochs.

Shapes: K tasks, U updates of an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bertkit.arrays import Int64Array
from bertkit.data.languages import smoothed
from bertkit.data.random import Draw
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.multitask import task_seed
from bertkit.finetuning.recipe import FinetuneRecipe


@dataclass(frozen=True)
class EpochOrder:
    """The items of each update: a new permutation every epoch, a pure function of the seed and the step.

    Attributes:
        num_examples: of the training features.
        batch_items: of one update; the last one of an epoch may have fewer.
        seed: of the permutations.
    """

    num_examples: int
    batch_items: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_examples / self.batch_items)

    def items(self, step: int) -> Int64Array:
        """The items of update number `step`, from 0."""
        epoch, number = divmod(step, self.steps_per_epoch)
        first = number * self.batch_items
        stop = min(first + self.batch_items, self.num_examples)
        return Draw(self.seed, "finetune").permuted_range("order", first, stop, size=self.num_examples, epoch=epoch)


@dataclass(frozen=True)
class TaskOrder:
    """The task and the items of each update: a pure function of the seed and the step.

    Attributes:
        orders: of each task's own items.
        seed: of the mixing.
        smoothing: S; a task's share of the updates is in proportion to (its batches)^S.

    Example: two tasks with three batches and one, mixed as 0 1 0 0, take the batches 0.0, 1.0, 0.1 and 0.2.
    """

    orders: tuple[EpochOrder, ...]
    seed: int
    smoothing: float = 1.0

    @classmethod
    def of(cls, recipe: FinetuneRecipe, prepared: Sequence[Prepared]) -> TaskOrder:
        """The order of a run, given the data of each of its tasks."""
        optimisation = recipe.optimisation
        assert optimisation.batch_sequences is not None
        orders = [
            EpochOrder(
                each.train.features.num_examples,
                optimisation.batch_sequences,
                task_seed(recipe.seed, number, each.spec.name),
            )
            for number, each in enumerate(prepared)
        ]
        return cls(tuple(orders), recipe.seed, optimisation.task_smoothing)

    @property
    def steps_per_epoch(self) -> int:
        """U: the batches of all tasks."""
        return sum(order.steps_per_epoch for order in self.orders)

    @property
    def steps_by_task(self) -> tuple[int, ...]:
        """Updates of each task in an epoch: its number of batches, unless shares are smoothed."""
        own = [order.steps_per_epoch for order in self.orders]
        return _apportioned(tuple(own), self.smoothing)

    def steps(self, epochs: float, max_steps: int | None) -> int:
        """The number of updates of a run."""
        steps = max(1, round(epochs * self.steps_per_epoch))
        return steps if max_steps is None else min(steps, max_steps)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, of update number `step`."""
        return step // self.steps_per_epoch

    def task(self, step: int) -> int:
        """The task of update number `step`, from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return int(_mixed(self.steps_by_task, self.seed, epoch)[place])

    def items(self, step: int) -> Int64Array:
        """The update's items: the next batch of its task."""
        epoch, place = divmod(step, self.steps_per_epoch)
        mixed_U = _mixed(self.steps_by_task, self.seed, epoch)
        task = int(mixed_U[place])
        taken = epoch * self.steps_by_task[task] + int((mixed_U[:place] == task).sum())
        return self.orders[task].items(taken)


@lru_cache(maxsize=4)
def _apportioned(batches: tuple[int, ...], smoothing: float) -> tuple[int, ...]:
    """Whole numbers in the smoothed shares, with the sum of `batches`, by largest remainders; none is zero."""
    if smoothing == 1.0:
        return batches
    share_K = smoothed(batches, smoothing) * sum(batches)
    count_K = np.floor(share_K).astype(np.int64)
    rest = sum(batches) - int(count_K.sum())
    count_K[np.argsort(count_K - share_K, kind="stable")[:rest]] += 1
    return tuple(count_K.tolist())


@lru_cache(maxsize=4)
def _mixed(counts: tuple[int, ...], seed: int, epoch: int) -> Int64Array:
    """The task of each update of an epoch, (U,)."""
    total = sum(counts)
    slot_U = Draw(seed, "finetune").permuted("tasks", np.arange(total), size=total, epoch=epoch)
    return np.searchsorted(np.cumsum(counts), slot_U, side="right").astype(np.int64)
