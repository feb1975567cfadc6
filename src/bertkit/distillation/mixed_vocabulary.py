"""A teacher's masked LM on text in two vocabularies: some words in its student's tokens, the others in its own.

Zhao et al. 2019, arXiv:1909.11687v1, dual training: every word of a training sequence is tokenized by the student's
vocabulary with probability p_DT. The teacher, which is trained together with its student, predicts the masked tokens,
each from the vocabulary it belongs to. It thus learns the student's words from contexts in its own words, and vice
versa. Its student reads the same text in its own tokens only (masked_lm.py) and is compared with its teacher in
shared_projections.py. The paper does not give p_DT; the default of 0.5 is our choice.

The corpus is stored in the student's tokens, so a word that is unknown to the student stays [UNK] for the teacher, too.
Special tokens are the teacher's own. The teacher's masks are drawn independently of the student's.

Shapes: T packed tokens of the student, N of the mixed text, B sequences, W words, U words tokenized by the teacher's
vocabulary, M masked tokens, V the student's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from bertkit.arrays import BoolArray, Int64Array
from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.distillation.dual_teacher import teacher_of
from bertkit.distillation.objectives import TaughtObjective
from bertkit.distillation.retokenize import WordRetokenizer
from bertkit.distillation.terms import ShapePair
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.objectives.base import Objective
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking import Tokens
from bertkit.objectives.masking.words import BatchWords
from bertkit.text.tokenizer import Tokenizer

_NOT_MASKED = -1
_LABEL, _TOKEN_TYPE, _DROPPED = "label", "token_type", "dropped"


class TeacherObjective(TaughtObjective):
    """An objective of a teacher that is trained together with its student; it does not read the student's states."""

    def reads(self, model: HeadedModel, batch: PackedBatch) -> Tensor | None:
        return batch.ids_T.new_zeros(0)

    def expected_reads(self, model: HeadedModel, predictions: float) -> float | None:
        return 0.0


@dataclass(frozen=True, eq=False)
class VocabularyPair:
    """What the corruption needs from both vocabularies; it is sent to worker processes.

    Attributes:
        retokenizer: from the student's tokens to the teacher's.
        rows: the first id of the student's tokens in the mixed text, after the rows of the teacher's table.
        words: V.
        teacher: the teacher's vocabulary.
        max_tokens: length of the teacher's longest sequence.
    """

    retokenizer: WordRetokenizer
    rows: int
    words: int
    teacher: Vocabulary
    max_tokens: int


@dataclass(frozen=True)
class Mixed:
    """A text tokenized by two vocabularies.

    Attributes:
        samples: with the ids of both vocabularies.
        origin_N: the student token that each token stands for; for a teacher token, the first student token of its
            word.
        dropped_B: tokens dropped from each sequence because they exceed the teacher's maximum length.
    """

    samples: Samples
    origin_N: Int64Array
    dropped_B: Int64Array


class MixedVocabulary(TeacherObjective):
    """The teacher's masked LM on words tokenized by either vocabulary."""

    student_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Probability that a word in the teacher's input is split by the student's vocabulary (the"
        " paper's p_DT).",
    )
    rate: float = Field(0.15, gt=0, lt=1, description="Masking rate: share of a sequence's tokens that is predicted.")
    max_predictions: int | None = Field(
        None, ge=1, description="Maximum number of predictions per sequence; null: no limit."
    )
    mask_share: float = Field(0.8, ge=0, le=1, description="Share of the predicted tokens that is replaced by [MASK].")
    random_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share that is replaced by a random token of the same vocabulary; the rest is unchanged.",
    )

    _vocabularies: VocabularyPair | None = PrivateAttr(None)

    term: ClassVar[str] = "mixed_vocabulary"
    is_shown: ClassVar[bool] = False
    rank: ClassVar[int] = MaskedLM.rank - 1
    """Words are tokenized before anything is masked for the student."""

    @model_validator(mode="after")
    def _shares_fit(self) -> MixedVocabulary:
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise ValueError(
                f"mask_share ({self.mask_share}) and random_share ({self.random_share}) must not exceed 1 in total"
            )
        return self

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        if not any(isinstance(each, MaskedLM) for each in objectives):
            return ["objective.mixed_vocabulary trains only the teacher; add masked_lm to train the student"]
        return []

    def between(self, student: Tokenizer, teacher: Tokenizer, *, rows: int, max_tokens: int) -> Self:
        """The objective with what it needs of both vocabularies.

        Args:
            student, teacher: the tokenizers.
            rows: rows of the teacher's word table.
            max_tokens: length of the teacher's longest sequence.

        Raises:
            DataError: one of the tokenizers cannot tokenize single words.
        """
        known = self.model_copy()
        known._vocabularies = VocabularyPair(
            WordRetokenizer(student, teacher), rows, student.vocab_size, Vocabulary.of(teacher), max_tokens
        )
        return known

    @property
    def vocabularies(self) -> VocabularyPair:
        """Both vocabularies; `between` must have set them."""
        assert self._vocabularies is not None, "between() sets them"
        return self._vocabularies

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Add the mixed text, masked, to the targets; the student's own text is unchanged.

        `index_M` of the targets has an entry for every token of the mixed text: the student's token that it stands for.
        `id_M` is the teacher's input there. Columns: `label`, the original token if it is masked, else -1;
        `token_type`; `dropped`, set at a sequence's first token.
        """
        mixed = self.mixed(samples, draw)
        ids_N, label_N = self._masked(mixed.samples, Draw(draw.seed, f"{draw.scope}/teacher"))
        dropped_N = np.zeros_like(ids_N)
        dropped_N[mixed.samples.cu_seqlens_B1[:-1]] = mixed.dropped_B
        columns = {_LABEL: label_N, _TOKEN_TYPE: mixed.samples.token_types_T, _DROPPED: dropped_N}
        return samples.with_targets(self.term, Targets(mixed.origin_N, ids_N, columns=columns))

    def mixed(self, samples: Samples, draw: Draw) -> Mixed:
        """The text as the teacher reads it, before masking.

        Args:
            samples: in the student's tokens, not corrupted.
            draw: one number per word, addressed by its first token, decides which vocabulary tokenizes it.
        """
        known = self.vocabularies
        special_T = known.retokenizer.special_V[samples.ids_T]
        words = BatchWords.of(samples, known.retokenizer.marks)
        by_student_W = samples.uniform_T(draw, "vocabulary/cut")[words.start_W] < self.student_share
        taken_W = ~by_student_W & (special_T[words.start_W] < 0)
        start_U, end_U = words.start_W[taken_W], (words.start_W + words.length_W)[taken_W]
        cut = [known.retokenizer.cut(samples.ids_T[a:b]) for a, b in zip(start_U.tolist(), end_U.tolist(), strict=True)]
        taken_T = np.zeros(words.word_T.shape, dtype=np.bool_)
        inside_T = words.word_T >= 0
        taken_T[inside_T] = taken_W[words.word_T[inside_T]]
        # A retokenized word replaces its first old token; its other old tokens are removed.
        length_T = np.where(taken_T, 0, 1)
        length_T[start_U] = [len(each) for each in cut]
        origin_N = np.repeat(np.arange(length_T.size), length_T)
        ids_N = np.where(special_T >= 0, special_T, samples.ids_T + known.rows)[origin_N]
        ids_N[taken_T[origin_N]] = np.concatenate([*cut, np.empty(0, dtype=np.int64)])
        return _within(known.max_tokens, samples, ids_N, origin_N)

    def _masked(self, mixed: Samples, draw: Draw) -> tuple[Int64Array, Int64Array]:
        """The teacher's input and labels: masked_lm's rule, applied to single tokens."""
        known = self.vocabularies
        masking = self._masking
        counts_B = masking.counts_B(
            mixed.lengths_B, np.bincount(mixed.sequence_T[~mixed.fixed_T], minlength=mixed.lengths_B.size)
        )
        index_M = Tokens().choose(mixed, known.teacher, counts_B, draw).index_M
        id_M = mixed.ids_T[index_M]
        action_M = mixed.uniform_T(draw, "mask/action")[index_M]
        is_own_M = id_M < known.rows
        uniform_M = mixed.uniform_T(draw, "mask/word")[index_M]
        random_M = (uniform_M * np.where(is_own_M, known.teacher.size, known.words)).astype(np.int64)
        random_M += np.where(is_own_M, 0, known.rows)
        stands_in_M = np.where(action_M < self.mask_share + self.random_share, random_M, id_M)
        ids_N, label_N = mixed.ids_T.copy(), np.full_like(mixed.ids_T, _NOT_MASKED)
        ids_N[index_M] = np.where(action_M < self.mask_share, known.teacher.mask_id, stands_in_M)
        label_N[index_M] = id_M
        return ids_N, label_N

    @property
    def _masking(self) -> MaskedLM:
        return MaskedLM(rate=self.rate, max_predictions=self.max_predictions)

    def compares(self, shapes: ShapePair) -> str:
        return f"words split by the student's vocabulary with probability {self.student_share:g}"

    def expected_count(self, length: int) -> float:
        return self._masking.expected_count(length)

    def count(self, batch: PackedBatch) -> int:
        return int((batch.targets[self.term].columns[_LABEL] >= 0).sum())

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """The teacher's summed cross-entropy at the masked tokens, each over the vocabulary it belongs to.

        Counters: masked tokens that are the `student`'s, how many of those are `right`, and tokens that were `dropped`.
        """
        targets = batch.targets[self.term]
        index_M = (targets.columns[_LABEL] >= 0).nonzero().flatten()
        own, students = teacher_of(model).loss(mixed_batch(batch), index_M, targets.columns[_LABEL][index_M])
        counters = {
            "student": torch.tensor(students.count),
            "right": students.correct,
            "dropped": targets.columns[_DROPPED].sum(),
        }
        return LossSum(own.sum + students.sum, own.count + students.count, own.correct + students.correct, counters)

    def figures(self, counters: Mapping[str, int], count: int) -> dict[str, float]:
        """Share of masked tokens that are the student's, the teacher's accuracy on them, and dropped tokens."""
        return {
            f"student_share/{self.term}": counters.get("student", 0) / max(1, count),
            f"student_accuracy/{self.term}": counters.get("right", 0) / max(1, counters.get("student", 0)),
            f"dropped/{self.term}": float(counters.get("dropped", 0)),
        }


def mixed_lengths(batch: PackedBatch) -> Tensor:
    """Number of tokens in each sequence of the mixed text, (B,)."""
    index_N = batch.targets[MixedVocabulary.term].index_M
    sequence_N = torch.bucketize(index_N, batch.sequences.cu_seqlens_B1[1:].long(), right=True)
    return torch.bincount(sequence_N, minlength=batch.num_sequences)


def mixed_batch(batch: PackedBatch) -> PackedBatch:
    """The mixed text as the teacher's input, without targets."""
    targets = batch.targets[MixedVocabulary.term]
    lengths_B = mixed_lengths(batch)
    first_N = torch.repeat_interleave(lengths_B.cumsum(0) - lengths_B, lengths_B, output_size=targets.count)
    return PackedBatch(
        ids_T=targets.id_M,
        token_types_T=targets.columns[_TOKEN_TYPE],
        positions_T=torch.arange(targets.count, device=first_N.device) - first_N,
        sequences=PackedSequences.from_lengths(lengths_B.cpu().numpy()).to(first_N.device),
        targets={},
        labels={},
    )


def _within(max_tokens: int, samples: Samples, ids_N: Int64Array, origin_N: Int64Array) -> Mixed:
    """Samples of the mixed tokens; too long sequences keep their first tokens and the last, closing one."""
    sequence_N = samples.sequence_T[origin_N]
    length_B = np.bincount(sequence_N, minlength=samples.lengths_B.size)
    position_N = np.arange(ids_N.size) - (np.cumsum(length_B) - length_B)[sequence_N]
    kept_N: BoolArray = (position_N < max_tokens - 1) | (position_N == length_B[sequence_N] - 1)
    kept_B = np.minimum(length_B, max_tokens)
    origin_N = origin_N[kept_N]
    mixed = Samples(
        ids_T=ids_N[kept_N],
        token_types_T=samples.token_types_T[origin_N],
        special_T=samples.fixed_T[origin_N],
        cu_seqlens_B1=np.concatenate([[0], np.cumsum(kept_B)]),
        epoch_B=samples.epoch_B,
        sample_B=samples.sample_B,
    )
    return Mixed(mixed, origin_N, length_B - kept_B)
