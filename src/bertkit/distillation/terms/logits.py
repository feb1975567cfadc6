"""The terms that compare outputs: logits of a task's classes, or of the words of a vocabulary.

Hinton et al. 2015, arXiv:1503.02531 (soft targets); Ba and Caruana 2014, arXiv:1312.6184 (logits themselves). The
logits of all tokens of a text, once per model, would be the largest tensors of a step, so they are computed and
compared a few rows at a time (`VocabularyProjection.compared`).

Shapes: M rows, K classes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.activations import ActivationSpec
from bertkit.distillation.losses import hard_targets, logit_squared_error, soft_targets
from bertkit.distillation.terms.base import DistillationTerm, OutputPair, ShapePair, summed
from bertkit.models.loss_sum import LossSum
from bertkit.models.operators.vocabulary import VocabularyProjection, WordLogits


class LogitTerm(DistillationTerm):
    """A term that needs only logits, so student and teacher can have any architecture."""

    compares_logits: ClassVar[bool] = True

    @abstractmethod
    def rows(self, student_MK: Tensor, teacher_MK: Tensor) -> Tensor:
        """The loss of each row, (M,)."""

    def over_words(self, student: VocabularyProjection, teacher: WordLogits) -> tuple[Tensor, Tensor]:
        """The summed loss of all rows, and how many have their largest logit at the teacher's largest."""
        return student.compared(teacher, self.rows)

    def specs(self, shapes: ShapePair) -> tuple[ActivationSpec, ActivationSpec]:
        return ActivationSpec(logits=True), ActivationSpec(logits=True)

    def count(self, batch: PackedBatch, rows: int) -> int:
        return rows

    def loss(self, pair: OutputPair) -> LossSum:
        student, teacher = pair.student, pair.teacher
        if isinstance(student.logits, VocabularyProjection):
            assert isinstance(teacher.logits, WordLogits)
            loss, agreeing = self.over_words(student.logits, teacher.logits)
            return LossSum(loss, student.logits.states_ME.shape[0], agreeing)
        student_MK, teacher_MK = student.logits_MK, teacher.logits_MK
        agreeing_M = student_MK.detach().argmax(dim=-1) == teacher_MK.argmax(dim=-1)
        return summed(self.rows(student_MK, teacher_MK), agreeing=agreeing_M)


class SoftTargets(LogitTerm):
    """The teacher's probabilities at a temperature: T^2 KL, summed over classes, mean over rows."""

    term: ClassVar[str] = "soft_targets"

    temperature: float = Field(1.0, gt=0, description="Temperature T that both models' logits are divided by.")

    def rows(self, student_MK: Tensor, teacher_MK: Tensor) -> Tensor:
        return soft_targets(student_MK, teacher_MK, self.temperature)

    def over_words(self, student: VocabularyProjection, teacher: WordLogits) -> tuple[Tensor, Tensor]:
        return student.divergence(teacher, self.temperature)


class HardTargets(LogitTerm):
    """The teacher's most likely class: cross-entropy, mean over rows."""

    term: ClassVar[str] = "hard_targets"

    def rows(self, student_MK: Tensor, teacher_MK: Tensor) -> Tensor:
        return hard_targets(student_MK, teacher_MK)


class LogitError(LogitTerm):
    """The teacher's logits: squared error, mean over classes and rows; for a regression, its number."""

    term: ClassVar[str] = "logit_error"

    def rows(self, student_MK: Tensor, teacher_MK: Tensor) -> Tensor:
        return logit_squared_error(student_MK, teacher_MK)
