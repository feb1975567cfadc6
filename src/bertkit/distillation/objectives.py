"""The terms of distillation as objectives of pretraining: a student reads a corrupted batch, and its teacher the same.

Sanh et al. 2019, DistilBERT, arXiv:1910.01108, section 3 (soft targets of all tokens, masked LM, cosine); Jiao et al.
2019, TinyBERT, arXiv:1909.10351, section 3.1; Sun et al. 2020, MobileBERT, arXiv:2004.02984, section 3.4. The terms
themselves, with their settings and formulas, are those of terms/; here each becomes an objective that
corrupts nothing and stands in a recipe's list under the same name. Sibling forward.py says who reads what.

Logits of a student and its teacher over all tokens would be the largest tensors of a step twice over: terms that
compare them do so a few rows at a time (`VocabularyProjection.divergence`).

Shapes: T packed tokens, M tokens whose words are compared, D width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field, create_model
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.teacher_cache import Answer, Answers, KeptWords
from bertkit.distillation.terms import TERMS, Activations, ActivationSpec, LinearMaps, Sizes, SoftTargets, Term
from bertkit.distillation.terms.base import ActivationRecorder, give_maps, maps_of
from bertkit.distillation.terms.base import wanted_of as wanted_by
from bertkit.distillation.terms.logits import LogitTerm
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder
from bertkit.models.vocabulary import VocabularyProjection, WordLogits
from bertkit.objectives.base import Objective
from bertkit.objectives.masked_lm import MaskedLM

_HEAD = MaskedLM.term


@dataclass(frozen=True)
class OutputPair:
    """What a student and its teacher made of one batch.

    Attributes:
        student, teacher: the models.
        hidden_TD, teacher_hidden_TD: the states that their heads read; the teacher's: None where its answers are kept.
        seen, teacher_seen: what was recorded inside them.
        sizes: of both.
        maps: the student's learnt maps.
        kept, kept_index_M: the teacher's likeliest words, and of which tokens, where answers are kept.
    """

    student: HeadedModel
    teacher: HeadedModel
    hidden_TD: Tensor
    teacher_hidden_TD: Tensor | None
    seen: Activations
    teacher_seen: Activations
    sizes: Sizes
    maps: LinearMaps
    kept: KeptWords | None = None
    kept_index_M: Tensor | None = None

    def projections(self, index_M: Tensor | None) -> tuple[VocabularyProjection, WordLogits]:
        """The student's logits and the teacher's at these tokens, or at all of them, not computed yet."""
        hidden = self.hidden_TD if index_M is None else self.hidden_TD.index_select(0, index_M)
        return self.student.projection(_HEAD, hidden), self._words(index_M)

    def _words(self, index_M: Tensor | None) -> WordLogits:
        if self.kept is not None:
            assert self.kept_index_M is not None, "they come together"
            return self.kept if index_M is None else self.kept.rows(torch.searchsorted(self.kept_index_M, index_M))
        assert self.teacher_hidden_TD is not None, "it is there where no answer was kept"
        with torch.no_grad():
            return words_of(self.teacher, self.teacher_hidden_TD, index_M)


def words_of(teacher: HeadedModel, hidden_TD: Tensor, index_M: Tensor | None) -> VocabularyProjection:
    """A teacher's logits at these tokens, or at all of them, not computed yet."""
    return teacher.projection(_HEAD, hidden_TD if index_M is None else hidden_TD.index_select(0, index_M))


class Distilled(Objective):
    """A term of distillation in a list of objectives."""

    kind: ClassVar[type[Term]]
    """The term."""

    has_accuracy: ClassVar[bool] = False

    @property
    def distilled(self) -> Term:
        """The term with its settings."""
        return self.kind(**{name: getattr(self, name) for name in self.kind.model_fields})

    @property
    def heads(self) -> tuple[str, ...]:
        return ()

    def expected_count(self, length: int) -> float:
        return float(length)

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        raise AssertionError(f"{self.term} is a comparison with a teacher: `Distilled.distance`")

    @abstractmethod
    def distance(self, compared: OutputPair) -> LossSum:
        """The term over one micro-batch."""


class DistilledStates(Distilled):
    """A term that looks inside both models."""

    def count(self, batch: PackedBatch) -> int:
        return self.distilled.count(batch, 0)

    def distance(self, compared: OutputPair) -> LossSum:
        return self.distilled.loss(compared.seen, compared.teacher_seen, compared.sizes, compared.maps)


class DistilledWords(Distilled):
    """A term that compares the words that both models find likely."""

    positions: Literal["all", "masked"] = Field(
        "all", description="Where words are compared: at all tokens, or only at those that masked_lm predicts."
    )

    has_accuracy: ClassVar[bool] = True

    @property
    def heads(self) -> tuple[str, ...]:
        return (_HEAD,)

    def errors_beside(self, objectives: Sequence[Objective]) -> list[str]:
        if self.positions == "masked" and not any(isinstance(each, MaskedLM) for each in objectives):
            return [
                f"objective.{self.term}.positions is masked, and nothing masks; add masked_lm to the objectives (with"
                " weight: 0, if it is not to be learnt from), or write positions: all"
            ]
        return []

    def count(self, batch: PackedBatch) -> int:
        return batch.num_tokens if self.positions == "all" else batch.targets[MaskedLM.term].count

    def reads(self, model: HeadedModel, batch: PackedBatch) -> Tensor | None:
        return None if self.positions == "all" else batch.targets[MaskedLM.term].index_M

    def distance(self, compared: OutputPair) -> LossSum:
        student, teacher = compared.projections(self.reads(compared.student, compared.seen.batch))
        term = self.distilled
        if isinstance(term, SoftTargets):
            loss, agreeing = student.divergence(teacher, term.temperature)
        else:
            assert isinstance(term, LogitTerm)
            loss, agreeing = student.compared(teacher, term.rows)
        return LossSum(loss, student.states_ME.shape[0], agreeing)


def _objective_of(kind: type[Term]) -> type[Distilled]:
    """The objective of a term: its settings, and under the same name."""
    base = DistilledWords if issubclass(kind, LogitTerm) else DistilledStates
    settings: dict[str, Any] = {name: (info.annotation, info) for name, info in kind.model_fields.items()}
    made = cast(
        type[Distilled],
        create_model(f"Distilled{kind.__name__}", __base__=base, __module__=__name__, __doc__=kind.__doc__, **settings),
    )
    made.kind, made.term = kind, kind.term
    globals()[made.__name__] = made  # where pickle looks, on the way to a worker
    return made


DISTILLED: dict[str, type[Distilled]] = {name: _objective_of(kind) for name, kind in TERMS.items()}
"""The objectives of distillation by the name that a recipe gives them."""


def distilled_among(objectives: Sequence[Objective]) -> tuple[Distilled, ...]:
    """Those of these objectives that need a teacher."""
    return tuple(objective for objective in objectives if isinstance(objective, Distilled))


def word_rows(objectives: Sequence[Objective], length: int) -> float:
    """About how many tokens of a sequence of this length any of these objectives has the words compared of."""
    words = [each for each in objectives if isinstance(each, DistilledWords)]
    if any(each.positions == "all" for each in words):
        return float(length)
    return sum(each.expected_count(length) for each in objectives if words and isinstance(each, MaskedLM))


def add_maps(model: HeadedModel, objectives: Sequence[Objective], sizes: Sizes, *, seed: int) -> None:
    """Put the learnt maps that these objectives need beside the student: all stages' at once, drawn by the seed.

    Raises:
        UsageError: student and teacher do not fit a term.
    """
    give_maps(model, [each.distilled for each in distilled_among(objectives)], sizes, seed=seed)


TeacherPass = Callable[[Recorder | None], Tensor]
"""A pass of the teacher over a batch: from a recorder to the states that its head reads."""


@dataclass(frozen=True)
class TeacherOutputs:
    """What a teacher made of a batch.

    Attributes:
        seen: what was recorded inside it.
        hidden_TD: the states that its head reads; None where its answer is cut to what is kept.
        words, index_M: its likeliest words, and of which tokens, where its answers are kept.
    """

    seen: Activations
    hidden_TD: Tensor | None
    words: KeptWords | None = None
    index_M: Tensor | None = None


class TeacherSession:
    """A teacher beside a student: what is asked of both, and what came of it.

    The teacher reads every batch once, in evaluation mode and without gradients.

    Args:
        teacher: where it computes; put into evaluation mode.
        student: the model that learns; its maps may be added later.
        objectives: of one stage.
        sizes: of both, as their configurations tell.
        answers: where the teacher's answers are kept, cut to its likeliest words; None to ask it in every pass.

    Raises:
        UsageError: student and teacher do not fit a term.
        DataError: a term looks inside a model whose layers cannot be recorded.
    """

    def __init__(
        self,
        teacher: HeadedModel,
        student: HeadedModel,
        objectives: Sequence[Objective],
        sizes: Sizes,
        *,
        answers: Answers | None = None,
    ) -> None:
        self.teacher = teacher.eval().requires_grad_(False)
        self.sizes = sizes
        wanted, teacher_wanted = wanted_of(objectives, sizes)
        self._student_viewer = ActivationRecorder(student, wanted)
        self._teacher_viewer = ActivationRecorder(teacher, teacher_wanted)
        self._answers = answers
        self._words = [each for each in objectives if isinstance(each, DistilledWords)]

    def recorder(self) -> Recorder | None:
        """What the student's pass is given."""
        return self._student_viewer.recorder()

    @torch.no_grad()
    def ask(self, batch: PackedBatch, read: TeacherPass) -> TeacherOutputs:
        """What the teacher makes of a batch: remembered where its answers are kept, else computed.

        Args:
            batch: what the student reads.
            read: the teacher's pass.
        """
        if self._answers is None:
            recorder = self._teacher_viewer.recorder()
            hidden_TD = read(recorder)
            return TeacherOutputs(self._teacher_viewer.seen(recorder, batch, None), hidden_TD)
        index_M = self._asked(batch)
        answer = self._answers.recall(batch, index_M)
        if answer is None:
            recorder = self._teacher_viewer.recorder()
            hidden_TD = read(recorder)
            words = None
            if self._words:
                logits = words_of(self.teacher, hidden_TD, index_M).in_precision()
                with torch.autocast(hidden_TD.device.type, enabled=False):
                    words = KeptWords.of(logits, index_M.numel(), self._answers.vocab_size, top_k=self._answers.top_k)
            answer = Answer(words, self._teacher_viewer.seen(recorder, batch, None))
            self._answers.keep(answer, index_M)
        return TeacherOutputs(answer.seen, None, answer.words, index_M)

    def _asked(self, batch: PackedBatch) -> Tensor:
        """The tokens whose words are compared by any term, ascending."""
        if any(each.positions == "all" for each in self._words):
            return torch.arange(batch.num_tokens, device=batch.ids_T.device)
        if self._words:
            return batch.targets[MaskedLM.term].index_M
        return torch.zeros(0, dtype=torch.int64, device=batch.ids_T.device)

    def compared(
        self,
        student: HeadedModel,
        batch: PackedBatch,
        hidden_TD: Tensor,
        recorder: Recorder | None,
        taught: TeacherOutputs,
    ) -> OutputPair:
        """What the student made of a batch beside what the teacher made of it, after both passes."""
        return OutputPair(
            student,
            self.teacher,
            hidden_TD,
            taught.hidden_TD,
            self._student_viewer.seen(recorder, batch, None),
            taught.seen,
            self.sizes,
            maps_of(student),
            taught.words,
            taught.index_M,
        )


def wanted_of(objectives: Sequence[Objective], sizes: Sizes) -> tuple[ActivationSpec, ActivationSpec]:
    """What must be seen of the student and of the teacher; of logits nothing, for they are formed part by part.

    Raises:
        UsageError: student and teacher do not fit a term.
    """
    inside = [each.distilled for each in distilled_among(objectives) if not isinstance(each, DistilledWords)]
    return wanted_by(inside, sizes)
