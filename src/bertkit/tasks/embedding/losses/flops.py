"""FLOPS: a penalty that makes vectors sparse, added to any loss.

Paria et al. 2020, Minimizing FLOPs to Learn Efficient Sparse Representations, arXiv:2004.05665: the sum over the words
of the squared mean of their weights in the batch, which estimates how many products a search needs. Formal et al. 2021,
SPLADE, arXiv:2107.05720, section 3.2: separate weights for queries and documents, which grow with the square of the
update's number. As in the released transformer_trainer.py, documents have the mean over the penalties of the positives
and the negatives.

Shapes: I examples, A texts of each, V words.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from bertkit.settings import Settings


class Sparsity(Settings):
    """The weights of the penalty."""

    queries: float = Field(ge=0, description="Weight of the penalty on the vectors of queries, the first texts.")
    documents: float = Field(ge=0, description="Weight of the penalty on the vectors of documents, all other texts.")
    warmup_share: float = Field(
        1 / 3,
        ge=0,
        le=1,
        description="Share of the updates during which the weights grow, with the square of the update's number.",
    )

    def growth(self, step: int, steps: int) -> float:
        """The factor of both weights in update number `step` of `steps`, counted from 0."""
        growing = self.warmup_share * steps
        return 1.0 if step + 1 >= growing else ((step + 1) / growing) ** 2

    def penalty(self, vectors_IAV: Tensor, growth: float) -> Tensor:
        """The penalty of a batch."""
        flops_A = vectors_IAV.mean(dim=0).square().sum(dim=-1)
        weighted = self.queries * flops_A[0]
        if flops_A.numel() > 1:
            weighted = weighted + self.documents * flops_A[1:].mean()
        return growth * weighted
