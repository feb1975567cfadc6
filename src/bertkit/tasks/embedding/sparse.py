"""SPLADE's vectors as a task: like Embedding, with a weight for each word of the vocabulary.

Formal et al. 2021, arXiv:2107.05720, and 2022, SPLADE++, arXiv:2205.04733. The vectors are pooled from the logits of
the initial model's masked-LM head (models/splade.py), which is trained and kept, and compared by their dot product.

Shapes: I examples, A texts of each, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from scipy.sparse import csr_matrix
from torch import Tensor

from bertkit.errors import UsageError
from bertkit.models.encoder import Encoder
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.splade import WORDS_HEAD
from bertkit.tasks.base import Features, Prediction, TaskBatch
from bertkit.tasks.embedding.losses.flops import Sparsity
from bertkit.tasks.embedding.losses.simcse import SimcseLoss
from bertkit.tasks.embedding.similarity import predicted
from bertkit.tasks.embedding.task import Embedding
from bertkit.tasks.examples import SentenceExample

log = logging.getLogger(__name__)


class SparseEmbedding(Embedding):
    """Texts as sparse vectors.

    Args:
        arguments, settings: of `Embedding`.
        sparsity: the penalty of vectors with many weights; None: none.

    Raises:
        UsageError: the loss, or another setting, does not fit sparse vectors.
    """

    head: ClassVar[str] = WORDS_HEAD
    of_encoder: ClassVar[bool] = False

    def __init__(self, *arguments: Any, sparsity: Sparsity | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.sparsity = sparsity
        self._growth = 1.0
        name = getattr(self.objective, "name", "")
        if self.matryoshka is not None:
            raise UsageError(
                "embedding.matryoshka: is for dense vectors; the first numbers of a sparse one are weights of arbitrary"
                " words; leave it out"
            )
        if isinstance(self.objective, SimcseLoss) and self.objective.projection:
            raise UsageError("embedding.loss.projection: sparse vectors have no projection; set it to false")
        if self.objective.rebuilds_text or self.objective.wanted == "vectors":
            raise UsageError(
                f"embedding.loss: {name} is for dense vectors; choose multiple_negatives, or margin with a teacher"
            )

    def vector_width(self, encoder: Encoder) -> int:
        return encoder.vocab_size

    @property
    def reads_whole_batch(self) -> bool:
        return super().reads_whole_batch or self.sparsity is not None

    def begin_update(self, step: int, steps: int) -> None:
        if self.sparsity is not None:
            self._growth = self.sparsity.growth(step, steps)

    def loss_with(self, model: HeadedModel, logits: Tensor, batch: TaskBatch) -> LossSum:
        found = super().loss_with(model, logits, batch)
        if self.sparsity is None:
            return found
        return replace(found, sum=found.sum + found.count * self.sparsity.penalty(logits, self._growth))

    def decode(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> list[Any]:
        """The vectors of each example's texts, a sparse matrix (A, V)."""
        return [csr_matrix(each) for each in super().decode(model, hidden_TD, batch)]

    def predictions(
        self, examples: Sequence[SentenceExample], features: Features, outputs: Sequence[Any]
    ) -> list[Prediction]:
        if outputs:
            counts_A = np.mean([each.getnnz(axis=1)[[0, -1]] for each in outputs], axis=0)
            log.info("mean number of words with a weight: %.1f in first texts, %.1f in last texts", *counts_A)
        return predicted(examples, outputs)
