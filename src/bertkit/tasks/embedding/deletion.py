"""Deleting words of a text, for a loss that reconstructs it.

Wang et al. 2021, TSDAE, arXiv:2104.06979, section 3. A word is a unit of the tokenizer's pre-tokenisation; the released
code uses nltk's words. At least one word of a text is kept.

Shapes: T packed tokens, I examples, S longest text, W words of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from bertkit.arrays import BoolArray, Int64Array
from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.tasks.base import TaskBatch
from bertkit.tasks.embedding.losses.base import EmbeddingLoss
from bertkit.tasks.embedding.losses.tsdae import NO_TOKEN, TsdaeLoss
from bertkit.tasks.encoding import SequenceEncoder

WORD, WHOLE = "word", "whole"
"""The number of each token's word in its text (-1 for special tokens); the tokens of the original texts."""
_NONE = -1


def words_of_tokens(texts: Sequence[str], encoder: SequenceEncoder) -> NDArray[np.int32]:
    """The word of each token, (T,), for sequences of one text each."""
    before, room = encoder.single.before, encoder.room(1)
    behind = encoder.single.special_tokens - before
    found: list[int] = []
    for encoding in encoder.encodings(texts):
        words = [_NONE if word is None else word for word in encoding.word_ids[:room]]
        found += [*[_NONE] * before, *words, *[_NONE] * behind]
    return np.asarray(found, dtype=np.int32)


def without_words(batch: TaskBatch, items: Int64Array, loss: EmbeddingLoss, draw: Draw, epoch: int) -> TaskBatch:
    """The batch with randomly deleted words, and the whole texts as a label; unchanged for other losses.

    Args:
        batch: with one sequence per example.
        items: the numbers of the examples, which determine the draws.
        loss: gives the share of the words.
        draw: of the run.
        epoch: each epoch deletes other words.
    """
    if not isinstance(loss, TsdaeLoss):
        return batch
    ids_T, words_T = batch.packed.ids_T.numpy(), batch.token_labels[WORD].numpy()
    types_T = batch.packed.token_types_T.numpy()
    bounds = batch.packed.sequences.cu_seqlens_B1.tolist()
    longest = max(end - start for start, end in pairwise(bounds))
    whole_IS = np.full((items.size, longest), NO_TOKEN, dtype=np.int64)
    ids: list[list[int]] = []
    types: list[list[int]] = []
    for number, (item, start, end) in enumerate(zip(items.tolist(), bounds, bounds[1:], strict=False)):
        whole_IS[number, : end - start] = ids_T[start:end]
        kept = _kept(words_T[start:end], loss.deletion, draw, int(item), epoch)
        ids.append(ids_T[start:end][kept].tolist())
        types.append(types_T[start:end][kept].tolist())
    packed = PackedBatch.from_ids(ids, types)
    labels = {**batch.example_labels, WHOLE: torch.from_numpy(whole_IS)}
    return replace(batch, packed=packed, example_labels=labels, token_labels={})


def _kept(words_S: NDArray[np.int32], share: float, draw: Draw, item: int, epoch: int) -> BoolArray:
    """Which tokens of a text are kept, bool (S,): special ones, and those of the kept words."""
    words_W = np.unique(words_S[words_S != _NONE])
    if not words_W.size:
        return np.ones(words_S.size, dtype=bool)
    drawn_W = draw.uniform("deletion", epoch=epoch, sample=item, position=words_W)
    kept_W = drawn_W >= share
    kept_W[int(drawn_W.argmax())] = True
    return np.asarray((words_S == _NONE) | np.isin(words_S, words_W[kept_W]))
