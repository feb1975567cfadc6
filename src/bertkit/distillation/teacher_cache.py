"""A teacher's outputs cached on disk: it reads each text only once, for any number of students.

Not from a paper; uses the project's record cache (cache.py). An item (an example of a task, a sequence of a text) is
identified by the hash of its tokens, of whether they are read only from left to right, and of the tokens whose logits
are requested. Its record is

    rows, columns, rows x columns floats of its logits, followed by its states

The rows are the logits of a task's classes. On text, only the k likeliest words are stored, plus one logit that all
other words then share: the one that preserves their total probability at temperature 1. A newly computed output is
truncated in the same way as one that is read back, so a full disk does not change the results. Attention scores, which
grow with the square of the length, are never stored.

Shapes: M rows of logits, V vocabulary, k likeliest words, D width; m rows of one part.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import Float32Array
from bertkit.cache import RecordCache
from bertkit.models.operators.vocabulary import LOGIT_BYTES, WordLogits

_FORMAT = "3"
"""Format version, part of a cache's identity: outputs written by older versions are recomputed."""
_SHAPE = struct.Struct("<II")
"""Rows and columns of an item's logits."""


@dataclass(frozen=True)
class CachedItem:
    """What is stored for one item.

    Attributes:
        rows, columns: shape of its logits, which are first in `values`.
        values: all its floats.
    """

    rows: int
    columns: int
    values: Float32Array

    @staticmethod
    def bytes_of(floats: float) -> float:
        """The size of a record with this many floats."""
        return _SHAPE.size + 4 * floats

    def to_bytes(self) -> bytes:
        """The record of the cache."""
        return _SHAPE.pack(self.rows, self.columns) + np.ascontiguousarray(self.values, dtype="<f4").tobytes()

    @classmethod
    def from_bytes(cls, record: bytes) -> CachedItem:
        """The inverse of `to_bytes`."""
        rows, columns = _SHAPE.unpack_from(record)
        return cls(rows, columns, np.frombuffer(record, dtype=np.float32, offset=_SHAPE.size))


def open_teacher_cache(root: Path, identity: Mapping[str, str], *, max_bytes: float) -> RecordCache:
    """The cache of a teacher's outputs with this identity, created if there is none.

    Args:
        root: of all caches.
        identity: what the outputs depend on, by name: teacher, tokenizer, data, what is stored.
        max_bytes: for all items; those that do not fit are not stored.

    Raises:
        DataError: the directory belongs to another identity, is not a cache, or cannot be written.
    """
    identity = {**identity, "format": _FORMAT}
    return RecordCache.under(root, "teachers", identity, what="outputs of the teacher", max_bytes=max_bytes)


@dataclass(frozen=True)
class TopLogits(WordLogits):
    """Logits of which only the largest are known exactly.

    Attributes:
        word_Mk, largest_Mk: the k likeliest words of each row, and their logits.
        rest_M1: the logit of every other word.
        vocab_size: V.
    """

    word_Mk: Tensor
    largest_Mk: Tensor
    rest_M1: Tensor
    vocab_size: int

    @classmethod
    def of(cls, logits: WordLogits, rows: int, vocab_size: int, *, top_k: int) -> TopLogits:
        """The top words of all rows, computed a few rows at a time; fewer than `top_k` if the vocabulary is smaller."""
        top_k = min(top_k, vocab_size - 1)
        size = max(1, LOGIT_BYTES // (8 * vocab_size))
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for first in range(0, max(1, rows), size):  # one part even without rows: it determines the device
            logits_mV = logits.part(slice(first, first + size))
            largest_mk, word_mk = logits_mV.topk(top_k, dim=-1)
            others_mV = logits_mV.scatter(1, word_mk, -torch.inf)
            rest_m1 = torch.logsumexp(others_mV, dim=-1, keepdim=True) - math.log(vocab_size - top_k)
            parts.append((word_mk, largest_mk, rest_m1))
        word_Mk, largest_Mk, rest_M1 = (torch.cat(column) for column in zip(*parts, strict=True))
        return cls(word_Mk, largest_Mk, rest_M1, vocab_size)

    def part(self, part: slice) -> Tensor:
        rest_mV = self.rest_M1[part].expand(-1, self.vocab_size).clone()
        return rest_mV.scatter_(1, self.word_Mk[part], self.largest_Mk[part])

    def rows(self, index_M: Tensor) -> TopLogits:
        return TopLogits(self.word_Mk[index_M], self.largest_Mk[index_M], self.rest_M1[index_M], self.vocab_size)

    def table(self) -> Float32Array:
        """Rows of words (as the bits of floats), logits and rest, (M, 2k + 1)."""
        columns = (self.word_Mk.int().view(torch.float32), self.largest_Mk, self.rest_M1)
        return np.asarray(torch.cat(columns, dim=1).cpu().numpy(), dtype=np.float32)

    @classmethod
    def from_table(cls, table: Float32Array, vocab_size: int, device: torch.device) -> TopLogits:
        """The inverse of `table`."""
        top_k = table.shape[1] // 2
        columns = torch.from_numpy(table)
        word_Mk = columns[:, :top_k].contiguous().view(torch.int32).long()
        return cls(
            word_Mk.to(device),
            columns[:, top_k : 2 * top_k].contiguous().to(device),
            columns[:, 2 * top_k :].contiguous().to(device),
            vocab_size,
        )
