"""The interface of layouts: they plan an epoch's samples, and assemble those of a batch.

A plan is a table with one row per sample, its token ranges; it is a pure function of the corpus, the draws and the
epoch, so it can be made again anywhere, and small enough to keep on disk.

Shapes: N documents, R rows (samples) of a plan, B rows of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bertkit.arrays import Int64Array
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.settings import Settings

Plan = NDArray[Any]
Ranges = Int64Array
Piece = int | tuple[int, int]
"""A part of a sample: the id of a special token, or a range of the corpus's tokens."""

PART_ROWS = 1 << 18
"""Rows after which a part of a plan ends."""


class Layout(Settings, ABC):
    """How text becomes samples. A layout is its own settings: plain data that travels to workers."""

    special_tokens: ClassVar[int]
    """Separator and classifier tokens in every sample."""

    labels: ClassVar[tuple[str, ...]] = ()
    """The per-sequence labels that it makes, by the name of the objective that they serve."""

    epoch_dependent: ClassVar[bool]
    """Whether every epoch (or static copy) has a plan of its own."""

    keeps_documents: ClassVar[bool] = False
    """Whether a document is one sample, so that none may be held out in part."""

    @property
    def choice(self) -> str:
        """The name by which a recipe chooses it."""
        return str(type(self).model_fields["name"].default)

    def errors(self, data: Any, optimisation: Any) -> Iterator[str]:
        """Why a recipe cannot have it: one sentence each, with the key and the remedy.

        Args:
            data, optimisation: the recipe's settings, of modules above this one.
        """
        return iter(())

    @abstractmethod
    def plan_parts(
        self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int
    ) -> Iterator[Plan]:
        """The rows of the plan in corpus order, as structured arrays of any length; at least one. Memory does not grow
        with the corpus if they are taken one at a time.

        Args:
            shards: the corpus.
            documents_N2: each document's first segment and the segment after its last.
            sequence_length: tokens of the longest sample, special tokens included.
            draw: the source of every random choice.
            epoch: or the static copy.
        """

    def plan(self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int) -> Plan:
        """All parts of the plan: a structured array of R rows."""
        return np.concatenate(list(self.plan_parts(shards, documents_N2, sequence_length, draw, epoch)))

    @abstractmethod
    def assemble(self, shards: TokenShards, plan_B: Plan, vocabulary: Vocabulary, address: Address) -> Samples:
        """The samples of these rows, end to end, not yet corrupted."""


class Address:
    """The places of samples in the stream, which key their draws.

    Attributes:
        epoch_B: the epoch, or the static copy, of each sample.
        sample_B: the row of each sample in its epoch's plan.
    """

    def __init__(self, epoch_B: Int64Array, sample_B: Int64Array) -> None:
        self.epoch_B = epoch_B
        self.sample_B = sample_B


def assembled(shards: TokenShards, pieces_B: Sequence[Sequence[Piece]], address: Address) -> Samples:
    """The samples that consist of these pieces, end to end, all of token type 0."""
    ids: list[Int64Array] = []
    marks: list[NDArray[np.uint8]] = []
    starts: list[int] = []
    unmarked = np.zeros(1, dtype=np.uint8)
    has_spans = bool(shards.span_fields)
    for piece in chain.from_iterable(pieces_B):
        if isinstance(piece, tuple):
            ids.append(shards.tokens_between(*piece))
            starts.append(piece[0])
            marks += [shards.span_marks_between(*piece)] if has_spans else []
        else:
            ids.append(np.array([piece]))
            starts.append(-1)
            marks += [unmarked] if has_spans else []
    ids_T, sizes = np.concatenate(ids), np.array([part.size for part in ids])
    ends = np.cumsum(sizes)
    source_T = np.arange(ids_T.size) + np.repeat(starts - ends + sizes, sizes)
    return Samples(
        ids_T=ids_T,
        token_types_T=np.zeros_like(ids_T),
        special_T=source_T < 0,
        cu_seqlens_B1=np.concatenate([[0], ends[np.cumsum([len(pieces) for pieces in pieces_B]) - 1]]),
        epoch_B=address.epoch_B,
        sample_B=address.sample_B,
        spans_T=np.concatenate(marks) if has_spans else None,
        source_T=source_T,
    )
