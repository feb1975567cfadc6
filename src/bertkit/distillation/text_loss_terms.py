"""The loss terms of a student on text: objectives, and comparisons with what its teacher computes of the same batch.

Sanh et al. 2019, DistilBERT, arXiv:1910.01108, section 3. Sibling task_loss_terms.py is of a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.objectives import Distilled, DistilledWords, OutputPair, TeacherSession, distilled_among
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import states
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.training.cost import FORWARD_SHARE, step_flops


class TaughtObjectiveTerms(ObjectiveTerms):
    """Objectives of which some compare the student with its teacher.

    Args:
        objectives: of one stage.
        session: the teacher beside the student.
    """

    def __init__(self, objectives: Sequence[Objective], session: TeacherSession) -> None:
        super().__init__(objectives)
        self.session = session

    def losses(
        self, model: HeadedModel, batch: PackedBatch, recorder: Recorder | None = None, *, train_encoder: bool = True
    ) -> Mapping[str, LossSum]:
        assert recorder is None, "the student's pass has the recorder of its terms"
        hidden_TD, pair = self.passes(model, batch)
        return {
            each.term: each.distance(pair) if isinstance(each, Distilled) else each.loss(model, hidden_TD, batch)
            for each in self.objectives
        }

    def passes(self, model: HeadedModel, batch: PackedBatch) -> tuple[Tensor, OutputPair]:
        """One pass of the student and one of its teacher: the student's states, and both models' outputs."""
        recorder = self.session.recorder()
        hidden_TD = states(model, self.objectives, batch, recorder)
        compared = distilled_among(self.objectives)
        taught = self.session.ask(batch, lambda inside: states(self.session.teacher, compared, batch, inside))
        return hidden_TD, self.session.compared(model, batch, hidden_TD, recorder, taught)

    def flops(self, model: HeadedModel, batches: Sequence[PackedBatch]) -> float:
        words = [each for each in self.objectives if isinstance(each, DistilledWords)]
        return super().flops(model, batches) + sum(
            teacher_flops(
                self.session.teacher,
                tokens=batch.num_tokens,
                squared_lengths=float((batch.sequences.cu_seqlens_B1.diff().double() ** 2).sum()),
                rows=max((each.count(batch) for each in words), default=0),
                sequences=batch.num_sequences,
            )
            for batch in batches
        )


def teacher_flops(
    teacher: HeadedModel, *, tokens: float, squared_lengths: float, rows: float, sequences: float
) -> float:
    """Floating-point operations of a teacher's pass over a batch, its words formed at so many tokens."""
    return FORWARD_SHARE * step_flops(
        teacher,
        tokens=tokens,
        squared_lengths=squared_lengths,
        predictions={MaskedLM.term: rows},
        sequences=sequences,
    )
