"""Samples before they become a batch: token ids end to end, in numpy, before and after an objective's corruption.

A layout assembles samples, objectives corrupt them and mark targets, and batch.py turns them into tensors. All of this
is a pure function of the seed and the sample's address, so it can run in any worker.

Shapes: T packed tokens, B sequences, M predicted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertkit.arrays import BoolArray, Float64Array, Int64Array
from bertkit.data.random import Draw
from bertkit.errors import DataError
from bertkit.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Targets:
    """What one objective predicts in a batch.

    Attributes:
        index_M: positions in T at which a prediction is made, ascending.
        id_M: the target at each position: the original token, or a label.
        places: other positions in T that a prediction reads, by name, each of shape M and in the same sequence.
        columns: other numbers for each prediction, by name, each of shape M, or with further dimensions.
    """

    index_M: Int64Array
    id_M: Int64Array
    places: Mapping[str, Int64Array] = field(default_factory=dict)
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def between(self, start: int, end: int) -> Targets:
        """The targets in the tokens from `start` to `end`, with positions counted from `start`."""
        low, high = np.searchsorted(self.index_M, [start, end])
        return Targets(
            self.index_M[low:high] - start,
            self.id_M[low:high],
            {name: place_M[low:high] - start for name, place_M in self.places.items()},
            {name: column_M[low:high] for name, column_M in self.columns.items()},
        )


@dataclass(frozen=True)
class Vocabulary:
    """What corruption needs from a tokenizer; plain data, so that it can be sent to workers.

    Attributes:
        size: V.
        mask_id: -1 if there is no [MASK]; `Objective.prepared` refuses tokenizers without the tokens it needs.
        word_start_V: tokens that begin a word; all tokens if the vocabulary does not mark words.
    """

    size: int
    pad_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    word_start_V: BoolArray

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """From a tokenizer with [PAD], [CLS] and [SEP]; DataError if one of these is missing."""
        try:
            word_start_V = tokenizer.word_start_V
        except DataError:
            word_start_V = np.ones(tokenizer.vocab_size, dtype=np.bool_)
        return cls(
            size=tokenizer.vocab_size,
            pad_id=tokenizer.pad_id,
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
            mask_id=tokenizer.mask_id if "mask" in tokenizer.roles else -1,
            word_start_V=word_start_V,
        )


@dataclass(frozen=True)
class Lanes:
    """Which sequences continue those of the previous step: each has a lane, the place in the batch at which its text
    continues step after step.

    Attributes:
        number_B: the lane of each sequence.
        reversed_B: whether its text is read from right to left.
        following_B: the token that comes next in the lane.
        reused_tokens: the number of a sequence's first tokens after which the lane's next sequence begins.
    """

    number_B: Int64Array
    reversed_B: BoolArray
    following_B: Int64Array
    reused_tokens: int

    def between(self, first: int, last: int) -> Lanes:
        """The lanes of some of the sequences."""
        own = slice(first, last)
        return Lanes(self.number_B[own], self.reversed_B[own], self.following_B[own], self.reused_tokens)


@dataclass(frozen=True)
class Samples:
    """Sequences laid end to end.

    Attributes:
        ids_T: token ids.
        token_types_T: 0 for the first segment, 1 for the second.
        special_T: true at separator and classifier tokens, which no objective may corrupt.
        cu_seqlens_B1: the start of each sequence, and T.
        epoch_B, sample_B: the address of each sequence for draws.
        targets: of tokens, by objective.
        labels: of sequences, by objective, each of shape B.
        causal_B: sequences in which a token attends only to itself and earlier tokens; None: none.
        spans_T: marks of annotated spans, as in `TokenShards.span_marks_between`; None without annotations.
        source_T: each token's position in the corpus, -1 for special tokens; None if no layout made the samples.
        lanes: how sequences continue those of the previous step; None: they do not.
        ranks_T2: the ranks of `PermutationOrder` (models/attention/relative_attention.py), of keys and of queries;
            None: all tokens attend to all.
        decoder_start_B: for an encoder-decoder, the position in each sequence at which the decoder's part begins; None:
            there is no decoder.
        order_T4: for sequences in which tokens of a text stand several times: each one's position in the text, its
            rank, and the first rank that sees it and the first one that no longer does; a token attends to those that
            its rank sees. None: positions are those in the sequence, and all tokens attend to all.
    """

    ids_T: Int64Array
    token_types_T: Int64Array
    special_T: BoolArray
    cu_seqlens_B1: Int64Array
    epoch_B: Int64Array
    sample_B: Int64Array
    targets: Mapping[str, Targets] = field(default_factory=dict)
    labels: Mapping[str, Int64Array] = field(default_factory=dict)
    causal_B: BoolArray | None = None
    spans_T: NDArray[np.uint8] | None = None
    source_T: Int64Array | None = None
    lanes: Lanes | None = None
    ranks_T2: Int64Array | None = None
    decoder_start_B: Int64Array | None = None
    order_T4: Int64Array | None = None

    @cached_property
    def lengths_B(self) -> Int64Array:
        return np.diff(self.cu_seqlens_B1)

    @cached_property
    def sequence_T(self) -> Int64Array:
        """Which sequence each token belongs to."""
        return np.repeat(np.arange(self.lengths_B.size), self.lengths_B)

    @cached_property
    def position_T(self) -> Int64Array:
        """Each token's position in its sequence."""
        return np.arange(self.ids_T.size) - self.cu_seqlens_B1[self.sequence_T]

    @cached_property
    def side_position_T(self) -> Int64Array:
        """Each token's position in its text, or within the encoder's or the decoder's part of its sequence."""
        if self.order_T4 is not None:
            return self.order_T4[:, 0]
        if self.decoder_start_B is None:
            return self.position_T
        start_T = self.decoder_start_B[self.sequence_T]
        return self.position_T - np.where(self.position_T >= start_T, start_T, 0)

    @cached_property
    def fixed_T(self) -> BoolArray:
        """Tokens that no objective may hide or change: special ones, and all of a causal sequence."""
        return self.special_T if self.causal_B is None else self.special_T | self.causal_B[self.sequence_T]

    @property
    def free_T(self) -> BoolArray:
        """Tokens that an objective may change: neither fixed nor predicted by an earlier objective."""
        free_T = ~self.fixed_T
        for targets in self.targets.values():
            free_T[targets.index_M] = False
        return free_T

    def uniform_T(self, draw: Draw, purpose: str) -> Float64Array:
        """One uniform number in [0, 1) per token, addressed by epoch, sample and position."""
        sequence_T = self.sequence_T
        return draw.uniform(
            purpose, epoch=self.epoch_B[sequence_T], sample=self.sample_B[sequence_T], position=self.position_T
        )

    def with_changes(self, **changes: Any) -> Samples:
        return replace(self, **changes)

    def with_targets(self, term: str, targets: Targets, **changes: Any) -> Samples:
        """The same samples with an objective's targets added."""
        return replace(self, targets={**self.targets, term: targets}, **changes)

    def split(self, max_tokens: int | None) -> Iterator[Samples]:
        """Parts of whole sequences with at most `max_tokens` tokens each; a longer sequence is a part of its own.

        A lane occurs only once in a part, so that its sequences are computed one after the other.
        """
        # Lanes ascend within a step; a lower number begins the next step's sequences.
        step_starts = (
            np.zeros(0, np.int64) if self.lanes is None else np.flatnonzero(np.diff(self.lanes.number_B) <= 0) + 1
        )
        if not step_starts.size and (max_tokens is None or self.ids_T.size <= max_tokens):
            yield self
            return
        ends = [*step_starts.tolist(), self.lengths_B.size]
        first = 0
        while first < self.lengths_B.size:
            end = next(end for end in ends if end > first)
            if max_tokens is not None:
                limit = self.cu_seqlens_B1[first] + max_tokens
                end = min(end, max(first + 1, int(np.searchsorted(self.cu_seqlens_B1, limit, side="right")) - 1))
            yield self._between(first, end)
            first = end

    def _between(self, first: int, last: int) -> Samples:
        start, end = self.cu_seqlens_B1[[first, last]]
        return Samples(
            ids_T=self.ids_T[start:end],
            token_types_T=self.token_types_T[start:end],
            special_T=self.special_T[start:end],
            cu_seqlens_B1=self.cu_seqlens_B1[first : last + 1] - start,
            epoch_B=self.epoch_B[first:last],
            sample_B=self.sample_B[first:last],
            targets={term: targets.between(int(start), int(end)) for term, targets in self.targets.items()},
            labels={name: label_B[first:last] for name, label_B in self.labels.items()},
            causal_B=None if self.causal_B is None else self.causal_B[first:last],
            spans_T=None if self.spans_T is None else self.spans_T[start:end],
            source_T=None if self.source_T is None else self.source_T[start:end],
            lanes=None if self.lanes is None else self.lanes.between(first, last),
            ranks_T2=None if self.ranks_T2 is None else self.ranks_T2[start:end],
            decoder_start_B=None if self.decoder_start_B is None else self.decoder_start_B[first:last],
            order_T4=None if self.order_T4 is None else self.order_T4[start:end],
        )
