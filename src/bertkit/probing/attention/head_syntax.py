"""Heads as parsers: does a head attend from a word to its syntactic head more often than a fixed offset would find it?

Clark et al. 2019, arXiv:1906.04341, section 4.1 (words from subwords) and table 1. Attention to a word is the sum over
its tokens, attention from a word the mean over them. Rows therefore still sum to 1, with special tokens counted as
words. Special tokens and the word itself are then left out, and a head predicts the word that gets most attention, or
in the other direction the word that attends most to this one. As in the paper, the best head and the best offset are
chosen for each relation on the same sentences that they are scored on. This favours the best of many heads, so compare
with the same choice among the heads of a model with random weights. The code published with the paper takes the
attention from a word's first token instead of the mean, and its score over all relations includes punctuation and the
root.

Shapes: A heads of all layers, n tokens, W words, K words and special tokens, R relations, O offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import Int64Array
from bertkit.probing.sentences import EncodedSentence

DIRECTIONS = ("dependent attends to head", "head attends to dependent")
ALL = "all"
PUNCTUATION = "punct"
FARTHEST = 10
OFFSETS = tuple(offset for offset in range(-FARTHEST, FARTHEST + 1) if offset)
"""Offsets of the baseline: position of the head relative to its dependent."""


def word_attention(maps_Ann: Tensor, sentence: EncodedSentence) -> Tensor:
    """Attention among words and special tokens, (A, K, K), in the order of the text.

    Args:
        maps_Ann: attention among tokens.
        sentence: the model's input; a special token counts as a word.
    """
    unit_n = torch.from_numpy(_units(sentence))
    count = int(unit_n[-1]) + 1
    member_nK = torch.nn.functional.one_hot(unit_n, count).to(maps_Ann.dtype)
    return (member_nK / member_nK.sum(0)).T @ maps_Ann @ member_nK


def among_words(maps_Ann: Tensor, sentence: EncodedSentence) -> Tensor:
    """The part of `word_attention` between words, (A, W, W); rows sum to at most 1."""
    unit_n = _units(sentence)
    words = torch.from_numpy(unit_n[sentence.spans_W2[:, 0]])
    return word_attention(maps_Ann, sentence)[:, words[:, None], words]


def _units(sentence: EncodedSentence) -> Int64Array:
    """The number of each token's word or special token, in text order, (n,)."""
    word_T = sentence.word_T
    begins = np.ones(word_T.size, dtype=bool)
    begins[1:] = (word_T[1:] != word_T[:-1]) | (word_T[1:] < 0)
    return np.cumsum(begins) - 1


def predicted_heads(attention_AWW: Tensor) -> Int64Array:
    """Each head's prediction of every word's syntactic head, (2, A, W), for `DIRECTIONS`; never the word itself."""
    own = torch.eye(attention_AWW.shape[-1], dtype=torch.bool)
    others_AWW = attention_AWW.masked_fill(own, -1.0)
    found: Int64Array = torch.stack([others_AWW.argmax(-1), others_AWW.argmax(-2)]).numpy()
    return found


@dataclass(frozen=True)
class RelationScore:
    """How well attention finds a relation.

    Attributes:
        name: name of the relation; `ALL` for all except punctuation.
        count: number of its words.
        head, direction, accuracy: number of the best head among all heads, its index into `DIRECTIONS`, and its
            accuracy.
        offset, offset_accuracy: the best offset and its accuracy; positive if the syntactic head follows its dependent.
    """

    name: str
    count: int
    head: int
    direction: int
    accuracy: float
    offset: int
    offset_accuracy: float


class DependencyScores:
    """Counts correct predictions of every head and offset by relation; sentences are added in any order.

    Args:
        relations: all relations as they are scored, with or without subtypes.
    """

    def __init__(self, relations: Sequence[str]) -> None:
        self.relations = tuple(relations)
        self._number = {name: number for number, name in enumerate(self.relations)}
        self._counts = np.zeros(len(self.relations), dtype=np.int64)
        self._offset_hits = np.zeros((len(self.relations), len(OFFSETS)), dtype=np.int64)
        self._hits: Int64Array | None = None

    def add(self, attention_AWW: Tensor, heads: Sequence[int], relations: Sequence[str]) -> None:
        """Add a sentence.

        Args:
            attention_AWW: attention among its words.
            heads: each word's syntactic head; negative for the root, which has none and is left out.
            relations: each word's relation to it.
        """
        head_W = np.array(heads, dtype=np.int64)
        numbers = np.array([self._number[name] for name in relations], dtype=np.int64)
        words = np.flatnonzero(head_W >= 0)
        if self._hits is None:
            self._hits = np.zeros((len(self.relations), 2, attention_AWW.shape[0]), dtype=np.int64)
        if not words.size:
            return
        hits_2AW = predicted_heads(attention_AWW)[:, :, words] == head_W[words]
        np.add.at(self._hits, numbers[words], hits_2AW.transpose(2, 0, 1))
        offset_W = head_W[words] - words
        np.add.at(self._offset_hits, numbers[words], offset_W[:, None] == np.array(OFFSETS))
        np.add.at(self._counts, numbers[words], 1)

    def scores(self, *, least: int = 1) -> list[RelationScore]:
        """`ALL` relations except punctuation, then each with at least `least` words, most frequent first; nothing if
        `ALL` has fewer."""
        if self._hits is None:
            return []
        plain = np.array([name.split(":")[0] != PUNCTUATION for name in self.relations], dtype=bool)
        rows = [self._best(ALL, self._counts[plain].sum(), self._hits[plain].sum(0), self._offset_hits[plain].sum(0))]
        order = np.argsort(-self._counts, kind="stable")
        rows += [
            self._best(self.relations[number], self._counts[number], self._hits[number], self._offset_hits[number])
            for number in order.tolist()
        ]
        least = max(1, least)
        return [row for row in rows if row.count >= least] if rows[0].count >= least else []

    def _best(self, name: str, count: int, hits_2A: Int64Array, hits_O: Int64Array) -> RelationScore:
        direction, head = np.unravel_index(int(hits_2A.argmax()), hits_2A.shape)
        offset, total = int(hits_O.argmax()), max(1, int(count))
        return RelationScore(
            name,
            int(count),
            int(head),
            int(direction),
            float(hits_2A.max() / total),
            OFFSETS[offset],
            float(hits_O.max() / total),
        )
