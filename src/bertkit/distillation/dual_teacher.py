"""A teacher that reads two vocabularies, its own and its student's, and is trained together with its student.

Zhao et al. 2019, arXiv:1909.11687v1, dual training: for each vocabulary the teacher has a word embedding table of its
own width and an output layer tied to that table. The vocabulary that a token belongs to decides which output layer
predicts it. Not specified in the paper: what the two output layers share (here the dense layer and norm before the
product with the words) and how the student's words are initialised (here randomly, by the teacher family's rules).

Both vocabularies share one id space: first the teacher's ids, then the student's.

Shapes: T packed tokens, M predicted tokens, D the teacher's width, V the rows of its own table, W the student's words.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.families.bert import BertStack
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.operators.vocabulary import VocabularyProjection

TEACHER = "teacher"
"""During training, the student's companion of this name is its teacher."""
_HEAD = "masked_lm"
_TABLE = "embeddings.word"


class StudentEmbedding(nn.Module):
    """The student's words in the teacher: an embedding of width D and an output bias for each."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(words, width))
        self.bias = nn.Parameter(torch.zeros(words))


class ConcatenatedEmbedding(nn.Module):
    """The teacher's word table followed by the student's; `weight` is the teacher's own."""

    def __init__(self, own: nn.Embedding, students: StudentEmbedding) -> None:
        super().__init__()
        self.own, self.students = own, students
        self.embedding_dim = own.embedding_dim

    @property
    def weight(self) -> Tensor:
        """(V, D)."""
        return self.own.weight

    def forward(self, ids_T: Tensor) -> Tensor:
        """(T, D); ids >= V are the student's."""
        rows = self.own.num_embeddings
        own_TD: Tensor = self.own(ids_T.clamp(max=rows - 1))
        students_TD = functional.embedding((ids_T - rows).clamp(min=0), self.students.weight)
        return torch.where((ids_T < rows)[:, None], own_TD, students_TD)


class DualTeacher(nn.Module):
    """A teacher with its own words and its student's.

    Args:
        model: the teacher. It is modified: its word table becomes a `ConcatenatedEmbedding`. Only its masked-LM
            head is used.
        words: W.
        seed: for initialising the student's words.

    Attributes:
        model: the teacher.
        own_words: V.

    Raises:
        DataError: the model is not of BERT's shape, so it cannot read two vocabularies, or it has no masked-LM head.
    """

    def __init__(self, model: HeadedModel, words: int, *, seed: int) -> None:
        super().__init__()
        check_teacher(model, source="the teacher")
        encoder = model.encoder
        students = StudentEmbedding(words, encoder.embedding_width)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            encoder.config.draw(f"{_TABLE}.weight", students.weight, generator)
        self.own_words = encoder.vocab_size
        self.model = HeadedModel(encoder, [_HEAD])
        self.model.add_module(_HEAD, model.get_submodule(_HEAD))
        encoder.get_submodule(_TABLE.partition(".")[0]).add_module(
            "word", ConcatenatedEmbedding(encoder.word_embedding, students)
        )
        self.model.requires_grad_(True)

    @property
    def students(self) -> StudentEmbedding:
        """The student's words."""
        found = self.model.encoder.get_submodule(f"{_TABLE}.students")
        assert isinstance(found, StudentEmbedding)
        return found

    def loss(self, batch: PackedBatch, index_M: Tensor, id_M: Tensor) -> tuple[LossSum, LossSum]:
        """Summed cross-entropy of the masked tokens of its own vocabulary, and that of the student's masked tokens.

        Args:
            batch: the teacher's input, in ids of both vocabularies.
            index_M: the masked tokens.
            id_M: the original tokens at these positions.
        """
        encoder = self.model.encoder
        states_MD = encoder.forward_tokens(encoder.with_global_tokens(batch, self.model.head_names), index_M)
        is_own_M = id_M < self.own_words
        own, students = is_own_M.nonzero().flatten(), (~is_own_M).nonzero().flatten()
        projection = self.model.projection(_HEAD, states_MD.index_select(0, own))
        return (
            LossSum.of_words(projection, id_M[own]),
            LossSum.of_words(self._students_projection(states_MD[students]), id_M[students] - self.own_words),
        )

    def _students_projection(self, states_MD: Tensor) -> VocabularyProjection:
        projection = self.model.projection(_HEAD, states_MD)
        return replace(projection, weight_VE=self.students.weight, bias_V=self.students.bias)


def check_teacher(model: HeadedModel, *, source: str) -> None:
    """Raise DataError unless a model can read two vocabularies: it needs BERT's word table and a masked-LM head."""
    family = model.encoder.config.model_type
    if not isinstance(model.encoder, BertStack) or model.encoder.embedding_width != model.encoder.width:
        raise DataError(
            f"{source}: models of the family {family} cannot read two vocabularies; use a teacher of BERT's shape"
        )
    if _HEAD not in model.head_names:
        raise DataError(
            f"{source}: objective.mixed_vocabulary trains the teacher as a masked LM, but the model has no masked-LM"
            f" head (its heads: {', '.join(model.head_names) or 'none'}); use the pretrained model before fine-tuning"
        )


def teacher_of(student: HeadedModel) -> DualTeacher:
    """The teacher that is trained together with a student."""
    found = student.companions[TEACHER]
    assert isinstance(found, DualTeacher)
    return found
