"""The loss terms of distillation: objectives on text or the loss of a task, and comparisons with a teacher.

Hinton et al. 2015, arXiv:1503.02531; the comparisons are those in terms/. All terms share one forward pass of the
student, with one dropout mask. The teacher reads a batch once, regardless of how many passes the student makes.

A task's teacher may read the same items in different tokens, if its tokenizer differs or it reads token types. The
batch then contains the items a second time, and only the logits of an item are compared.

Shapes: T packed tokens, B sequences, I items, M rows of logits, K classes, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.activations import ActivationRecorder, Activations
from bertkit.distillation.objectives import DistillationObjective, WordObjective, distillation_objectives
from bertkit.distillation.teacher import ItemLayout, TaskQuery, Teacher, TextQuery, words_at
from bertkit.distillation.terms import LABELS, DistillationTerm, OutputPair, ShapePair, projections_of, specs_of
from bertkit.finetuning.loss_terms import TaskTerms
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.operators.vocabulary import WordLogits
from bertkit.models.recorder import Recorder
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import states
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.tasks.base import Task, TaskBatch
from bertkit.training.step import StepOutcome
from bertkit.training.trainer import Trainer


class TeacherCost(Trainer[Any]):
    """A trainer that also counts the teacher's FLOPs; outputs that come from a cache cost nothing."""

    def update(self, batches: Sequence[Any]) -> StepOutcome:
        if (teacher := self._teacher(self.step)) is not None:
            teacher.flops = 0.0
        return super().update(batches)

    def flops(self, batches: Sequence[Any]) -> float:
        teacher = self._teacher(self.step - 1)
        return super().flops(batches) + (0.0 if teacher is None else teacher.flops)

    def _teacher(self, step: int) -> Teacher | None:
        terms = self.loss_terms(step)
        return terms.teacher if isinstance(terms, TextDistillationTerms | TaskDistillationTerms) else None


class _StudentRecorder(ActivationRecorder):
    """Records the student, together with other recorders that read or edit its states."""

    def beside(self, other: Recorder | None) -> Recorder | None:
        own = self.recorder()
        if own is None or other is None:
            return other if own is None else own
        return other.also(own.wanted)


class TextDistillationTerms(ObjectiveTerms):
    """The objectives of a stage, including those that need a teacher.

    Args:
        objectives: in the order in which they are summed.
        student: the model being trained, with its projections.
        teacher: reads what the student reads.
        shapes: of both models.
        top_k: how many of the likeliest words per token the teacher's cache stores.
    """

    def __init__(
        self,
        objectives: Sequence[Objective],
        *,
        student: HeadedModel,
        teacher: Teacher,
        shapes: ShapePair,
        top_k: int = 1,
    ) -> None:
        super().__init__(objectives)
        self.teacher = teacher
        self.shapes = shapes
        self.compared = distillation_objectives(objectives)
        self._words = [each for each in self.compared if isinstance(each, WordObjective)]
        self._vocab_size = teacher.models[0].encoder.vocab_size
        self._top_k = min(top_k, self._vocab_size - 1)
        spec, _ = specs_of([each.distilled for each in self.compared], shapes, key="objective")
        self._student = _StudentRecorder(student, spec)

    def losses(
        self, model: HeadedModel, batch: PackedBatch, recorder: Recorder | None = None, *, train_encoder: bool = True
    ) -> Mapping[str, LossSum]:
        own = self._student.beside(recorder)
        hidden_TD = states(model, self.objectives, batch, own)
        student = self._student.activations(own, batch)
        query = self.query(batch)
        teacher = self.teacher.outputs(query)
        losses: dict[str, LossSum] = {}
        for objective in self.objectives:
            if not isinstance(objective, DistillationObjective):
                losses[objective.term] = objective.loss(model, hidden_TD, batch)
                continue
            pair = OutputPair(student, teacher, self.shapes, projections_of(model))
            if isinstance(objective, WordObjective):
                index_M = objective.index_M(batch)
                words = words_at(model, hidden_TD, index_M)
                pair = replace(pair, student=replace(student, logits=words), teacher=_at(teacher, index_M, query))
            losses[objective.term] = objective.distilled.loss(pair)
        return losses

    def query(self, batch: PackedBatch) -> TextQuery:
        """The teacher's input for a batch, and the tokens whose words are compared by any term."""

        def states_of(model: HeadedModel, recorder: Recorder | None) -> Tensor:
            return states(model, self.compared, batch, recorder)

        index_M: Tensor | None = torch.zeros(0, dtype=torch.int64, device=batch.ids_T.device)
        if any(each.positions == "all" for each in self._words):
            index_M = None
        elif self._words:
            index_M = batch.targets[MaskedLM.term].index_M
        return TextQuery(batch, states_of, index_M, self._top_k, self._vocab_size)


def _at(teacher: Activations, index_M: Tensor | None, query: TextQuery) -> Activations:
    """The teacher's outputs with the words of these tokens only."""
    if index_M is None or query.index_M is not None:
        return teacher
    assert isinstance(teacher.logits, WordLogits)
    return replace(teacher, logits=teacher.logits.rows(index_M))


@dataclass(frozen=True)
class TaughtBatch(TaskBatch):
    """Some items as the student reads them.

    Attributes:
        teachers: the same items as the teacher reads them.
    """

    teachers: TaskBatch

    @classmethod
    def of(cls, own: TaskBatch, teachers: TaskBatch) -> TaughtBatch:
        return cls(own.packed, own.example_B, own.example_labels, own.token_labels, teachers)

    def to(self, device: torch.device) -> TaughtBatch:
        return TaughtBatch.of(super().to(device), self.teachers.to(device))


def task_query(task: Task, batch: TaskBatch) -> TaskQuery:
    """The query with which a teacher of the task reads a batch."""

    def logits_of(model: HeadedModel, hidden_TD: Tensor) -> Tensor:
        return task.imitated(task.logits(model, hidden_TD, batch), batch)

    sequences_I = torch.bincount(batch.example_B, minlength=batch.num_examples).tolist()
    items = ItemLayout(task.rows_of(batch), sequences_I, task.row_tokens(batch))
    return TaskQuery(batch.packed, task.head, logits_of, items)


class TaskDistillationTerms(TaskTerms):
    """The loss of one task, and comparisons with its teacher.

    Args:
        task: the task of both student and teacher.
        terms: the comparisons; none for a control.
        labels_weight: weight of the task's own loss; 0 leaves it out.
        student: the model being trained, with its projections.
        teacher: only read, never trained; None if there are no comparisons.
        shapes: of both models.
    """

    def __init__(
        self,
        task: Task,
        terms: Sequence[DistillationTerm],
        *,
        labels_weight: float,
        student: HeadedModel,
        teacher: Teacher | None,
        shapes: ShapePair,
    ) -> None:
        super().__init__(task)
        self.terms = tuple(terms)
        self.teacher = teacher
        self.shapes = shapes
        own = {LABELS: labels_weight} if labels_weight else {}
        self.weights = own | {term.term: term.weight for term in self.terms}
        spec, _ = specs_of(self.terms, shapes, key="distillation")
        self._student = _StudentRecorder(student, spec)
        self.computes_all_tokens = spec.has_layers
        self._needs_logits = bool(own) or spec.logits
        self._last: tuple[TaskBatch, Activations] | None = None

    def has_accuracy(self, term: str) -> bool:
        compared = {LABELS, *(each.term for each in self.terms if each.compares_logits)}
        return self.task.has_accuracy and term in compared

    def counts(self, batch: TaskBatch) -> Mapping[str, int]:
        rows = sum(self.task.rows_of(batch))
        own = {LABELS: self.task.count(batch)} if LABELS in self.weights else {}
        return own | {term.term: term.count(batch.packed, rows) for term in self.terms}

    def losses(
        self, model: HeadedModel, batch: TaskBatch, recorder: Recorder | None = None, *, train_encoder: bool = True
    ) -> Mapping[str, LossSum]:
        own = self._student.beside(recorder)
        with torch.set_grad_enabled(train_encoder and torch.is_grad_enabled()):
            if self.computes_all_tokens:
                hidden_TD = model(batch.packed, own)
            else:
                hidden_TD = model.states(self.task.head, batch.packed, own)
        losses: dict[str, LossSum] = {}
        logits = self.task.logits(model, hidden_TD, batch) if self._needs_logits else None
        if LABELS in self.weights:
            assert logits is not None
            losses[LABELS] = self.task.loss_of(logits, batch)
        if self.terms:
            imitated_MK = None if logits is None else self.task.imitated(logits, batch)
            student = self._student.activations(own, batch.packed, imitated_MK)
            pair = OutputPair(student, self._outputs(batch), self.shapes, projections_of(model))
            losses |= {term.term: term.loss(pair) for term in self.terms}
        return losses

    def _outputs(self, batch: TaskBatch) -> Activations:
        """The teacher's outputs on a batch, computed once, regardless of how many passes there are over it."""
        if self._last is None or self._last[0] is not batch:
            assert self.teacher is not None
            theirs = batch.teachers if isinstance(batch, TaughtBatch) else batch
            self._last = batch, self.teacher.outputs(task_query(self.task, theirs))
        return self._last[1]
