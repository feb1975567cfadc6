"""Adaptive softmax over a vocabulary sorted by frequency: the most common words, and clusters of rarer ones.

Grave et al. 2017, arXiv:1609.04309, as in Transformer-XL's released code (Dai et al. 2019, arXiv:1901.02860;
utils/proj_adaptive_softmax.py with div_val 1): the first softmax is over the most common words and one entry per
cluster; the probability of a word in a cluster is that of the cluster's entry times that in a softmax over the cluster.
The weights of all words are the tied embedding's. Sibling vocabulary.py has one softmax over all words.

Quirk honoured: as in that code, the i-th entry from the end belongs to cluster i.

Shapes: M predicted tokens, E width of the embeddings, V vocabulary, K clusters, H words and entries of the first
softmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn

from bertkit.errors import UsageError
from bertkit.models.operators.vocabulary import (
    RowsLoss,
    VocabularyHead,
    VocabularyProjection,
    WordLogits,
)


@dataclass(frozen=True)
class AdaptiveProjection(VocabularyProjection):
    """Log-probabilities that are not computed yet.

    Attributes:
        entry_KE, entry_bias_K: weights and biases of the clusters' entries.
        ends: the first word after the most common ones and after each cluster; the last number is V.
    """

    entry_KE: Tensor
    entry_bias_K: Tensor
    ends: tuple[int, ...]

    def logits(self) -> Tensor:
        """Log-probabilities, (M, V)."""
        return self.part(slice(None))

    def part(self, part: slice) -> Tensor:
        states_mE = self.states_ME[part]
        first_mH = self._first(states_mE).logits().float().log_softmax(-1)
        parts = [first_mH[:, : self.ends[0]]]
        for cluster, (low, high) in enumerate(pairwise(self.ends), start=1):
            words = self._words(states_mE, low, high).logits().float().log_softmax(-1)
            parts.append(words + first_mH[:, -cluster, None])
        return torch.cat(parts, dim=1)

    def cross_entropy(
        self,
        id_M: Tensor,
        *,
        z_loss: float = 0.0,
        weight_M: Tensor | None = None,
        label_smoothing: float = 0.0,
        logit_bytes: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy in nats, and the number of rows predicted correctly: their word has the highest
        probability in the first softmax, or their cluster's entry has it and the word has it within the cluster.

        Args:
            id_M: the word of each row.
            z_loss: as in `VocabularyProjection`, for every softmax that a word is in.
            weight_M: as there.
            label_smoothing: 0; no objective with whole words uses it.
            logit_bytes: as there.
        """

        assert not label_smoothing

        def part(projection: VocabularyProjection, target_m: Tensor, index_m: Tensor) -> tuple[Tensor, Tensor]:
            weight_m = None if weight_M is None else weight_M[index_m]
            return projection.cross_entropy(target_m, z_loss=z_loss, weight_M=weight_m, logit_bytes=logit_bytes)

        first = self._first(self.states_ME)
        cluster_M = torch.bucketize(id_M, torch.tensor(self.ends, device=id_M.device), right=True)
        size = first.weight_VE.shape[0]
        entry_M = torch.where(cluster_M == 0, id_M, size - cluster_M)
        common_M = (cluster_M == 0).nonzero().flatten()
        loss, correct = part(first.rows(common_M), id_M[common_M], common_M)
        for cluster, (low, high) in enumerate(pairwise(self.ends), start=1):
            index_M = (cluster_M == cluster).nonzero().flatten()
            if not index_M.numel():
                continue
            entries, own_M = first.rows(index_M), id_M[index_M] - low
            words = self._words(self.states_ME.index_select(0, index_M), low, high)
            for projection, target_M in ((entries, entry_M[index_M]), (words, own_M)):
                loss = loss + part(projection, target_M, index_M)[0]
            with torch.no_grad():
                chosen = entries.logits().argmax(-1) == entry_M[index_M]
                correct = correct + (chosen & (words.logits().argmax(-1) == own_M)).sum()
        return loss, correct

    def divergence(
        self, teacher: WordLogits, temperature: float = 1.0, *, logit_bytes: int | None = None
    ) -> tuple[Tensor, Tensor]:
        raise UsageError(_NO_TEACHER)

    def compared(
        self, teacher: WordLogits, rows_loss: RowsLoss, *, logit_bytes: int | None = None
    ) -> tuple[Tensor, Tensor]:
        raise UsageError(_NO_TEACHER)

    def in_precision(self) -> Self:
        plain = super().in_precision()
        entry_KE, entry_bias_K = (each.to(plain.states_ME.dtype) for each in (self.entry_KE, self.entry_bias_K))
        return replace(plain, entry_KE=entry_KE, entry_bias_K=entry_bias_K)

    def _first(self, states_ME: Tensor) -> VocabularyProjection:
        """The first softmax: the most common words and the clusters' entries."""
        common = self.ends[0]
        assert self.bias_V is not None
        return VocabularyProjection(
            states_ME,
            torch.cat([self.weight_VE[:common], self.entry_KE]),
            torch.cat([self.bias_V[:common], self.entry_bias_K]),
        )

    def _words(self, states_ME: Tensor, low: int, high: int) -> VocabularyProjection:
        """The softmax within a cluster."""
        assert self.bias_V is not None
        return VocabularyProjection(states_ME, self.weight_VE[low:high], self.bias_V[low:high])


_NO_TEACHER = (
    "model.cutoffs: an adaptive softmax has no logit for every word to compare with a teacher's; write cutoffs: []"
)


class WordBias(nn.Module):
    """One bias per word."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab_size))


class AdaptiveDecoder(VocabularyHead):
    """The adaptive softmax as a head.

    Args:
        vocab_size: V.
        embedding_width: E.
        cutoffs: the first word of each cluster, ascending; those beyond the vocabulary are ignored.
    """

    def __init__(self, vocab_size: int, embedding_width: int, cutoffs: Sequence[int]) -> None:
        super().__init__()
        self.ends = (*(each for each in cutoffs if each < vocab_size), vocab_size)
        self.words = WordBias(vocab_size)
        clusters = len(self.ends) - 1
        self.cluster_weight = nn.Parameter(torch.zeros(clusters, embedding_width)) if clusters else None
        self.cluster_bias = nn.Parameter(torch.zeros(clusters)) if clusters else None

    def output_rows(self, vocab_size: int) -> float:
        """The first softmax, and a cluster's as often as its words are targets by Zipf's law: the word of rank r has
        the share log((r + 2) / (r + 1)) / log(V + 1)."""
        rows = float(self.ends[0] + len(self.ends) - 1)
        for low, high in pairwise(self.ends):
            rows += (high - low) * math.log((high + 1) / (low + 1)) / math.log(vocab_size + 1)
        return rows

    def project(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> VocabularyProjection:
        if self.cluster_weight is None or self.cluster_bias is None:
            return VocabularyProjection(hidden_MD, word_embedding_VE, self.words.bias)
        return AdaptiveProjection(
            hidden_MD, word_embedding_VE, self.words.bias, self.cluster_weight, self.cluster_bias, self.ends
        )
