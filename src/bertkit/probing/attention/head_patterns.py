"""The five shapes of attention maps: vertical, diagonal, vertical and diagonal, block, heterogeneous.

Kovaleva et al. 2019, "Revealing the Dark Secrets of BERT", arXiv:1908.08593, section 4.2. The paper trained a
convolutional network on some 400 hand-sorted maps. Neither the maps nor the network are published, so a rule derived
from the paper's description of each shape decides here. Its shares are comparable between models measured here, but not
with the paper's.

    v  attention to special tokens ([CLS], [SEP]), mean over all tokens
    d  attention to ordinary tokens at a distance of at most 1 (the token itself counts), mean over all tokens
    s  share of the attention between ordinary tokens that stays within the same text of the two

    v + d >= 1/2:  vertical if v is at least 4/5 of v + d, diagonal if d is, else both
    otherwise:     block if s >= 3/4, else heterogeneous

Shapes: A heads of all layers, n tokens, W words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.arrays import Int64Array
from bertkit.probing.sentences import EncodedSentence
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.readers.common import Notes

PATTERNS = ("vertical", "diagonal", "vertical+diagonal", "block", "heterogeneous")
TOO_LONG = "pairs of sentences longer than the model reads (left out)"
CONCENTRATED, ALONE, WITHIN = 1 / 2, 4 / 5, 3 / 4
"""The rule's three thresholds: minimum v + d of a map with columns or a diagonal; minimum share for one of the two to
count alone; minimum s of a block."""


def pairs(
    sentences: Iterable[EncodedSentence], sequences: SequenceEncoder, notes: Notes
) -> Iterator[tuple[EncodedSentence, int]]:
    """Two neighbouring sentences as one input, `[CLS] A [SEP] B [SEP]` in the family's layout, with the first one's
    word count.

    Args:
        sentences: each is used once.
        sequences: the model's layout of a pair.
        notes: counts pairs that are too long.
    """
    stream = iter(sentences)
    for number, (first, second) in enumerate(zip(stream, stream, strict=False)):
        bodies = [each.ids_T[each.spans_W2[0, 0] : each.spans_W2[-1, 1]] for each in (first, second)]
        name = f"{first.name} + {second.name}"
        if sum(body.size for body in bodies) > sequences.room(2):
            notes.add(TOO_LONG, name)
            continue
        ids, types = sequences.sequence(*(body.tolist() for body in bodies), example=name)
        frames = sequences.pair.frames
        starts = [len(frames[0]), len(frames[0]) + bodies[0].size + len(frames[1])]
        word_T = np.full(len(ids), -1, dtype=np.int64)
        spans, seen = [], 0
        for each, body, start in zip((first, second), bodies, starts, strict=True):
            inner = each.word_T[each.spans_W2[0, 0] : each.spans_W2[-1, 1]]
            word_T[start : start + body.size] = np.where(inner < 0, -1, inner + seen)
            spans.append(each.spans_W2 - each.spans_W2[0, 0] + start)
            seen += len(each.words)
        yield (
            EncodedSentence(
                number,
                name,
                first.words + second.words,
                np.array(ids, dtype=np.int64),
                np.array(types, dtype=np.int64),
                word_T,
                np.concatenate(spans),
            ),
            len(first.words),
        )


def classify(maps_Ann: Tensor, pair: EncodedSentence, first_words: int) -> Int64Array:
    """The shape of each head's map for one pair, (A,), as indices into `PATTERNS`.

    Args:
        maps_Ann: rows sum to 1.
        pair: the model's input.
        first_words: words of the first text.
    """
    special_n = torch.from_numpy(pair.special_T)
    second_n = torch.from_numpy(pair.word_T >= first_words)
    position_n = torch.arange(special_n.numel())
    near_nn = (position_n[:, None] - position_n).abs() <= 1
    vertical_A = maps_Ann[:, :, special_n].sum(-1).mean(-1)
    diagonal_A = (maps_Ann * (near_nn & ~special_n)).sum(-1).mean(-1)
    ordinary_Ann = maps_Ann * (~special_n[:, None] & ~special_n)
    same_nn = second_n[:, None] == second_n
    total_A = ordinary_Ann.sum((-1, -2))
    within_A = (ordinary_Ann * same_nn).sum((-1, -2)) / total_A.clamp_min(torch.finfo(total_A.dtype).tiny)
    return by_rule(vertical_A.numpy(), diagonal_A.numpy(), within_A.numpy())


def by_rule(
    vertical_A: NDArray[np.floating], diagonal_A: NDArray[np.floating], within_A: NDArray[np.floating]
) -> Int64Array:
    """The shapes that the rule gives for v, d and s."""
    total_A = vertical_A + diagonal_A
    concentrated = np.where(vertical_A >= ALONE * total_A, 0, np.where(diagonal_A >= ALONE * total_A, 1, 2))
    spread = np.where(within_A >= WITHIN, 3, 4)
    return np.where(total_A >= CONCENTRATED, concentrated, spread).astype(np.int64)
