"""Squared error to a teacher's vectors.

Reimers and Gurevych 2020, arXiv:2004.09813, section 2: a student maps a sentence and its translation to the teacher's
vector of the sentence. With one text per example, this is plain distillation of an embedder. The error is averaged over
an example's texts and the vectors' dimensions, as in the released MSELoss.py.

Shapes: I examples, A texts of each, E width of the vectors.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import nn

from bertkit.models.loss_sum import LossSum
from bertkit.tasks.embedding.losses.base import EmbeddingLoss, TargetKind, TextVectors, mean_of


class TeacherVectorLoss(EmbeddingLoss):
    """Squared error between each text's vector and the teacher's vector of the example's first text."""

    name: Literal["teacher_vectors"] = "teacher_vectors"

    texts: ClassVar[tuple[int, int | None]] = (1, None)
    wanted: ClassVar[TargetKind | None] = "vectors"
    of_parts: ClassVar[bool] = False

    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        return mean_of(((batch.vectors_IAE - batch.wanted[:, None]) ** 2).mean(dim=(1, 2)))
