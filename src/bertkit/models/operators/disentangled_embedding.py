"""Gradient-disentangled embedding sharing: a model's word embeddings as another model's plus its own difference.

He et al. 2021, DeBERTaV3, arXiv:2111.09543, section 3.3, equation 8; details as in the released rtd_task.py. The
discriminator of replaced-token detection reads the sum of its generator's table and of a table of differences that
starts as zeros. Its gradient reaches the differences alone, so that the two losses do not pull one table in two
directions; the generator's table is trained by the generator's loss alone.

Shapes: T tokens, V vocabulary, E width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

DIFFERENCE = ".difference.weight"
"""The ending of the name of the differences, in place of the table's `.weight`."""


class DisentangledEmbedding(nn.Module):
    """The sum of another model's word embeddings, which it does not train, and of its own differences.

    Args:
        own: embeddings whose weights become the differences; until `settle` they are the whole sum.
        shared: the other model's embeddings, of the same shape.
    """

    def __init__(self, own: nn.Embedding, shared: nn.Embedding) -> None:
        super().__init__()
        self.difference = own
        # In a tuple, so that its weights stay the other model's and are not this one's, too.
        self._shared = (shared,)

    @property
    def shared(self) -> nn.Embedding:
        """The other model's embeddings."""
        return self._shared[0]

    @property
    def embedding_dim(self) -> int:
        return self.difference.embedding_dim

    @property
    def weight(self) -> Tensor:
        """The sum, (V, E), without gradient."""
        return (self.shared.weight + self.difference.weight).detach()

    def forward(self, ids_T: Tensor) -> Tensor:
        rows_TE: Tensor = self.difference(ids_T)
        return rows_TE + functional.embedding(ids_T, self.shared.weight.detach())

    @torch.no_grad()
    def settle(self) -> None:
        """Start with the own embeddings as the shared ones, and zeros as differences."""
        self.shared.weight.copy_(self.difference.weight)
        self.difference.weight.zero_()

    @torch.no_grad()
    def share_instead(self, table_VE: Tensor) -> None:
        """Give the other model another table; the sum stays the same."""
        whole_VE = self.weight
        self.shared.weight.copy_(table_VE)
        self.difference.weight.copy_(whole_VE - table_VE)
