"""Heads for pretraining: what is asked of the hidden states, and only at the positions asked for.

Devlin et al. 2019, BERT, arXiv:1810.04805, sections 3.1 and A.2; as in the released run_pretraining.py. The vocabulary
projection is tied to the word embeddings and runs on the M predicted positions, never on all T tokens.

Shapes: M predicted tokens, B sequences, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertkit.models.layers import ACTIVATIONS, Activation


class MaskedLMHead(nn.Module):
    """Dense, activation, norm, then the transposed word embedding and a bias."""

    def __init__(self, width: int, vocab_size: int, *, activation: Activation, norm_eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.activation = ACTIVATIONS[activation]
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden_MD: Tensor, word_embedding_VD: Tensor) -> Tensor:
        """Logits, (M, V)."""
        transformed_MD = self.norm(self.activation(self.dense(hidden_MD)))
        return functional.linear(transformed_MD, word_embedding_VD, self.bias)


class Pooler(nn.Module):
    """tanh of a linear map of each sequence's first token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, first_BD: Tensor) -> Tensor:
        return torch.tanh(self.dense(first_BD))
