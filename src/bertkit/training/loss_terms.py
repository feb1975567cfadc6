"""What an update makes smaller: one term or several, of one forward pass.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4: the task's own loss, here. Sibling distillation.py adds what a
teacher says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder
from bertkit.tasks.base import Task, TaskBatch
from bertkit.training.gradients import Parts, Share
from bertkit.training.step import TermTotal


class LossTerms(ABC):
    """Terms of a loss with their weights.

    Attributes:
        weights: of each term's mean in the total, by name.
    """

    weights: Mapping[str, float]

    @abstractmethod
    def counts(self, batch: TaskBatch) -> Mapping[str, int]:
        """How many rows each term sums over a micro-batch, known before the step."""

    @abstractmethod
    def parts(self, model: HeadedModel, batch: TaskBatch, recorder: Recorder | None, *, learns: bool) -> Parts:
        """Each term over a micro-batch, of one forward pass.

        Args:
            model: in training mode.
            batch: where the model is.
            recorder: what is changed on the way, if anything is.
            learns: whether the encoder does; else no gradient is kept in it.
        """

    def has_accuracy(self, term: str) -> bool:
        """Whether the term counts how many of its rows are right."""
        return True

    def shares(self, batches: Sequence[TaskBatch]) -> dict[str, Share]:
        """What each term's sum is to the total of these micro-batches."""
        counts = [self.counts(batch) for batch in batches]
        return {
            term: Share(weight, max(1, sum(count[term] for count in counts))) for term, weight in self.weights.items()
        }

    def total(self, terms: Mapping[str, TermTotal]) -> float:
        """The loss: each term's mean times its weight."""
        return sum(self.weights[term] * total.mean for term, total in terms.items())


class TaskLossTerms(LossTerms):
    """The task's own loss."""

    term = "task"

    def __init__(self, task: Task) -> None:
        self.task = task
        self.weights = {self.term: 1.0}

    def counts(self, batch: TaskBatch) -> Mapping[str, int]:
        return {self.term: self.task.count(batch)}

    def parts(self, model: HeadedModel, batch: TaskBatch, recorder: Recorder | None, *, learns: bool) -> Parts:
        with torch.set_grad_enabled(learns):
            hidden_TD = model.states(self.task.head, batch.packed, recorder)
        return {self.term: self.task.loss(model, hidden_TD, batch)}
