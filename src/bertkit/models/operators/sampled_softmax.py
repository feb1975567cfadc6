"""The cross-entropy of a word against a sample of the vocabulary instead of all words.

Jean et al. 2015, arXiv:1412.2007, section 3, as in TensorFlow's sampled_softmax_loss, which ELMo's released code trains
with. Words are drawn once for all rows, without repetition, frequent ones more often (log-uniform over a vocabulary
sorted by frequency). Each logit is reduced by the logarithm of its word's expected count in such a sample. The result
is an estimate; evaluations compute the full softmax (sibling vocabulary.py).

Shapes: M rows, V vocabulary, N drawn words.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from bertkit.models.operators.matmul import linear
from bertkit.models.operators.vocabulary import VocabularyProjection


def draw_words(count: int, vocab_size: int) -> tuple[Tensor, int]:
    """N different words, drawn log-uniformly with torch's generator, and the number of draws needed to find them.

    Args:
        count: N, at most V.
        vocab_size: V.
    """
    draws = count
    uniform = torch.rand(0, dtype=torch.float64)
    while True:
        # Further draws are appended: the sample does not depend on how many are drawn at once.
        uniform = torch.cat([uniform, torch.rand(draws, dtype=torch.float64)])
        word = (torch.exp(uniform * math.log(vocab_size + 1)) - 1).long().clamp(max=vocab_size - 1)
        values, inverse = torch.unique(word, return_inverse=True)
        first = torch.full((values.numel(),), word.numel()).scatter_reduce(
            0, inverse, torch.arange(word.numel()), "amin"
        )
        if values.numel() >= count:
            tries = int(first.sort().values[count - 1]) + 1
            return values[first < tries], tries
        draws = word.numel()


def expected_counts(word: Tensor, vocab_size: int, tries: int) -> Tensor:
    """The probability that a word is among this many draws, in float64."""
    word = word.double()
    chance = ((word + 2) / (word + 1)).log() / math.log(vocab_size + 1)
    return -torch.expm1(tries * torch.log1p(-chance))


def sampled_cross_entropy(projection: VocabularyProjection, id_M: Tensor, negatives: int) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in nats against the drawn words, and the number of rows whose word has the largest logit
    among them.

    Args:
        projection: projection onto the whole vocabulary; only the logits of some words are computed.
        id_M: the word of each row.
        negatives: N, at most V.
    """
    vocab_size = projection.weight_VE.shape[0]
    drawn_N, tries = draw_words(min(negatives, vocab_size), vocab_size)
    drawn_N = drawn_N.to(id_M.device)
    bias_V = projection.bias_V
    assert bias_V is not None, "heads with a sampled softmax have a bias"
    correction_N, correction_M = (expected_counts(word, vocab_size, tries).log().float() for word in (drawn_N, id_M))
    logits_MN = linear(projection.states_ME, projection.weight_VE[drawn_N], bias_V[drawn_N]).float()
    logits_MN = logits_MN - correction_N
    logits_MN = logits_MN.masked_fill(drawn_N == id_M[:, None], torch.finfo(logits_MN.dtype).min)
    own_M = (projection.states_ME * projection.weight_VE[id_M]).sum(-1).float() + bias_V[id_M] - correction_M
    logits_MN1 = torch.cat([own_M[:, None], logits_MN], dim=1)
    loss = functional.cross_entropy(logits_MN1, torch.zeros_like(id_M), reduction="sum")
    return loss, (logits_MN1.detach().argmax(-1) == 0).sum()
