"""Multiple negatives: find each anchor's positive among the texts of the whole batch.

Henderson et al. 2017, arXiv:1705.00652, section 4.4; the InfoNCE of van den Oord et al. 2018, arXiv:1807.03748. An
example may have negatives of its own. Batches that exceed memory are computed in parts (Gao et al. 2021, GradCache,
arXiv:2101.06983): vectors of all parts first, then each part again with the gradient of its vectors (task.py).

A text that occurs twice in a batch would be its own negative. Such candidates are left out here; the released
MultipleNegativesRankingLoss.py relies on its sampler.

Shapes: I examples, A texts of each, E width, C = I (A - 1) candidates.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from bertkit.models.loss_sum import LossSum
from bertkit.models.similarity import Similarity
from bertkit.tasks.embedding.losses.base import EmbeddingLoss, ScoredTexts, TextVectors, unit


class MultipleNegativesLoss(EmbeddingLoss):
    """Cross-entropy of each anchor's positive among all positives and negatives of the batch."""

    name: Literal["multiple_negatives"] = "multiple_negatives"
    scale: float | None = Field(
        None,
        gt=0,
        description="Scale of the similarities: the inverse of a temperature (default: 20, for dot and maxsim 1).",
    )
    similarity: Literal["cosine", "dot", "maxsim"] | None = Field(
        None,
        description="Similarity of two texts (default: dot for sparse vectors, whose lengths matter; maxsim for late"
        " interaction; else cosine).",
    )
    symmetric: bool = Field(
        False, description="Also find each positive's anchor among all anchors; the loss is the mean of both."
    )
    mask_duplicates: bool = Field(
        True,
        description="Leave out candidates whose text equals the anchor or its positive; otherwise they count as"
        " negatives.",
    )

    has_accuracy: ClassVar[bool] = True
    texts: ClassVar[tuple[int, int | None]] = (2, None)
    compares_examples: ClassVar[bool] = True
    reads_scores: ClassVar[ScoredTexts | None] = "all"

    later_fields: ClassVar[frozenset[str]] = frozenset({"similarity"})

    def of_similarity(self, similarity: Literal["cosine", "dot", "maxsim"]) -> MultipleNegativesLoss:
        """The loss with this similarity, if it has none of its own."""
        return self if self.similarity is not None else self.model_copy(update={"similarity": similarity})

    @property
    def compared_by(self) -> Similarity | None:
        return None if self.similarity == "maxsim" else self.similarity or "cosine"

    @property
    def factor(self) -> float:
        """By which similarities are multiplied."""
        return self.scale or (20.0 if self.compared_by == "cosine" else 1.0)

    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        return self.among(batch.vectors_IAE, batch.text_IA)

    def among(self, vectors_IAE: Tensor, text_IA: Tensor | None) -> LossSum:
        """The loss of these vectors; text numbers identify duplicates."""
        anchor_IE, candidate_CE = vectors_IAE[:, 0], vectors_IAE[:, 1:].transpose(0, 1).flatten(0, 1)
        if self.compared_by == "cosine":
            anchor_IE, candidate_CE = unit(anchor_IE), unit(candidate_CE)
        logits_IC = self.factor * (anchor_IE @ candidate_CE.T)
        back_II = self.factor * (candidate_CE[: anchor_IE.shape[0]] @ anchor_IE.T) if self.symmetric else None
        return self._of_logits(logits_IC, back_II, text_IA)

    def of_scores(self, scores: Tensor, target: Tensor | None, text_IA: Tensor | None) -> LossSum:
        logits_IC = self.factor * scores
        return self._of_logits(logits_IC, logits_IC[:, : scores.shape[0]].T if self.symmetric else None, text_IA)

    def _of_logits(self, logits_IC: Tensor, back_II: Tensor | None, text_IA: Tensor | None) -> LossSum:
        """The loss of the anchors' logits, and of those of the positives among all anchors if it is symmetric."""
        own_I = torch.arange(logits_IC.shape[0], device=logits_IC.device)
        masked = text_IA if self.mask_duplicates else None
        if masked is not None:
            candidate_C = masked[:, 1:].T.flatten()
            logits_IC = logits_IC.masked_fill(_duplicates(masked, candidate_C), -torch.inf)
        forward = LossSum.cross_entropy(logits_IC, own_I)
        if back_II is None:
            return forward
        if masked is not None:
            back_II = back_II.masked_fill(_duplicates(masked.flip(1)[:, -2:], masked[:, 0]), -torch.inf)
        back = functional.cross_entropy(back_II.float(), own_I, reduction="sum")
        return LossSum((forward.sum + back) / 2, forward.count, forward.correct)


def _duplicates(text_IA: Tensor, candidate_C: Tensor) -> Tensor:
    """Whether a candidate is the same text as the example's anchor or positive, except that positive itself,
    bool (I, C)."""
    same_IC = (text_IA[:, :1] == candidate_C) | (text_IA[:, 1:2] == candidate_C)
    own_I = torch.arange(text_IA.shape[0], device=text_IA.device)
    same_IC[own_I, own_I] = False
    return same_IC
