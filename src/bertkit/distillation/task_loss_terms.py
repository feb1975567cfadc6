"""What an update of a student makes smaller: terms of what its teacher says of a batch, and the task's own loss.

Hinton et al. 2015, arXiv:1503.02531; the terms are those of terms/. One forward pass of the student
serves all of them, with one draw of dropout. training/loss_terms.py has the task's own loss alone.

The teacher may read the same items otherwise, where its tokenizer is another or it tells segments apart: then a batch
holds them a second time, and only what both say of an item is compared.

Shapes: T packed tokens, B sequences, I items, M rows of logits, K classes, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertkit.distillation.teacher import Teacher, TeacherBatch
from bertkit.distillation.terms import Activations, Shape, Sizes, Term
from bertkit.distillation.terms.base import ActivationRecorder, maps_of, wanted_of
from bertkit.distillation.terms.logits import LogitTerm
from bertkit.finetuning.loss_terms import task_flops
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder
from bertkit.tasks.base import Task, TaskBatch
from bertkit.training.cost import FORWARD_SHARE
from bertkit.training.loss_terms import LossTerms

LABELS = "labels"
"""The task's own loss among the terms."""


@dataclass(frozen=True)
class TaughtBatch(TaskBatch):
    """Some items as the student reads them.

    Attributes:
        teachers: the same items as the teacher reads them.
    """

    teachers: TaskBatch

    @classmethod
    def of(cls, own: TaskBatch, teachers: TaskBatch) -> TaughtBatch:
        return cls(own.packed, own.item_B, own.item_labels, own.token_labels, teachers)

    def to(self, device: torch.device) -> TaughtBatch:
        return TaughtBatch.of(super().to(device), self.teachers.to(device))


def looks_inside(terms: Sequence[Term]) -> bool:
    """Whether any term compares more than what the models say."""
    return any(not isinstance(term, LogitTerm) for term in terms)


def sizes_of(student: HeadedModel, teacher: HeadedModel, terms: Sequence[Term]) -> Sizes:
    """What the terms must know of both; models of which only the logits count may be of any kind.

    Raises:
        DataError: layers are compared, and those of a model cannot be recorded.
    """
    if not looks_inside(terms):
        return Sizes(Shape(0, 0, 0), Shape(0, 0, 0))
    return Sizes(Shape.of(student), Shape.of(teacher))


def reading_of(task: Task, batch: TaskBatch) -> TeacherBatch:
    """How a teacher of the task reads a batch."""

    def logits_of(model: HeadedModel, hidden_TD: Tensor) -> Tensor:
        return task.imitated(task.logits(model, hidden_TD, batch), batch)

    sequences_I = torch.bincount(batch.item_B, minlength=batch.num_items).tolist()
    return TeacherBatch(batch.packed, task.head, logits_of, task.rows_of(batch), sequences_I, task.asked(batch))


class DistillationLossTerms(LossTerms[TaskBatch]):
    """The terms of one task.

    Args:
        task: student's and teacher's.
        terms: what the teacher says; none for a control.
        labels_weight: of the task's own loss; 0 leaves it out.
        student: the model that learns, with its maps beside it.
        teacher: read and never trained; None where there are no terms.
        sizes: of both.
    """

    def __init__(
        self,
        task: Task,
        terms: Sequence[Term],
        *,
        labels_weight: float,
        student: HeadedModel,
        teacher: Teacher | None,
        sizes: Sizes,
    ) -> None:
        self.task = task
        self.terms = tuple(terms)
        self.teacher = teacher
        self.sizes = sizes
        self.maps = maps_of(student)
        own = {LABELS: labels_weight} if labels_weight else {}
        self.weights: Mapping[str, float] = own | {term.term: term.weight for term in self.terms}
        wanted, _ = wanted_of(self.terms, sizes)
        self._viewer = ActivationRecorder(student, wanted)
        self._says = bool(own) or wanted.logits
        self._last: tuple[TaskBatch, Activations] | None = None

    def has_accuracy(self, term: str) -> bool:
        return term == LABELS or any(isinstance(each, LogitTerm) for each in self.terms if each.term == term)

    def counts(self, batch: TaskBatch) -> Mapping[str, int]:
        rows = sum(self.task.rows_of(batch))
        own = {LABELS: self.task.count(batch)} if LABELS in self.weights else {}
        return own | {term.term: term.count(batch.packed, rows) for term in self.terms}

    def losses(
        self, model: HeadedModel, batch: TaskBatch, recorder: Recorder | None = None, *, train_encoder: bool = True
    ) -> Mapping[str, LossSum]:
        own = self._viewer.recorder()
        if own is not None and recorder is not None:
            own = recorder.also(own.wanted)
        with torch.set_grad_enabled(train_encoder and torch.is_grad_enabled()):
            hidden_TD = (
                model.states(self.task.head, batch.packed, recorder) if own is None else model(batch.packed, own)
            )
        parts: dict[str, LossSum] = {}
        logits = self.task.logits(model, hidden_TD, batch) if self._says else None
        if LABELS in self.weights:
            assert logits is not None
            parts[LABELS] = self.task.loss_of(logits, batch)
        if self.terms:
            imitated_MK = None if logits is None else self.task.imitated(logits, batch)
            student, teacher = self._viewer.seen(own, batch.packed, imitated_MK), self._taught(batch)
            parts |= {term.term: term.loss(student, teacher, self.sizes, self.maps) for term in self.terms}
        return parts

    def flops(self, model: HeadedModel, batches: Sequence[TaskBatch]) -> float:
        flops = task_flops(model, self.task.head, batches)
        if self.teacher is None or self.teacher.store is not None:
            return flops
        read = [batch.teachers if isinstance(batch, TaughtBatch) else batch for batch in batches]
        return flops + FORWARD_SHARE * sum(task_flops(each, self.task.head, read) for each in self.teacher.models)

    def _taught(self, batch: TaskBatch) -> Activations:
        """What the teacher says of a batch, asked once however many passes there are over it."""
        if self._last is None or self._last[0] is not batch:
            assert self.teacher is not None
            theirs = batch.teachers if isinstance(batch, TaughtBatch) else batch
            self._last = batch, self.teacher.see(reading_of(self.task, theirs))
        return self._last[1]
