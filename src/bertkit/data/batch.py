"""The only batch format: tokens of all sequences end to end, without padding between the embedding and the head.

Only attention uses the sequence bounds. For torch's scaled dot-product attention, which needs rectangles, sequences are
gathered by length into a few blocks; the indices are computed here, once per batch, outside the step.

    ids_T          [CLS] the cat [SEP] [CLS] a [MASK] returns a list [SEP]
    cu_seqlens_B1  0                   4                                  11
    index_M (of a target)                     6

Shapes: T packed tokens, B sequences, b sequences of one block, S its longest sequence, P = sum of b*S, M predicted
tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.arrays import BoolArray, Int64Array
from bertkit.data.pinned import moved, pinned
from bertkit.data.samples import Samples, Targets

BLOCK_WASTE = 0.25
"""Shorter sequences are added to a block while at most this share of a row would be padding."""

SHORTEST_BLOCK = 8
"""The length of the shortest independent block, and the step between lengths up to 128 tokens."""


def own_block_length(lengths: Int64Array) -> Int64Array:
    """The block length of each sequence if it depends on that sequence alone: up to an eighth longer than the sequence,
    in steps of 8 up to 128 tokens, of 16 up to 256, and so on."""
    steps = np.maximum(SHORTEST_BLOCK, 2 ** np.maximum(np.ceil(np.log2(lengths)).astype(np.int64) - 4, 0))
    return np.asarray(-(-lengths // steps) * steps)


@dataclass(frozen=True)
class AttentionBlock:
    """A rectangle of sequences.

    Attributes:
        sequences, length: b and S; a sequence that occurs twice counts twice in b.
        mask_b11S: true at the tokens that are attended to, by default all but padding; None: at all cells.
        causal_b: sequences whose tokens attend only to themselves and earlier tokens; None if there are none.
    """

    sequences: int
    length: int
    mask_b11S: Tensor | None
    causal_b: Tensor | None = None


@dataclass(frozen=True)
class PackedSequences:
    """The bounds of sequences, and how attention gathers them into blocks.

    Attributes:
        cu_seqlens_B1: int32, the start of each sequence, and T.
        max_length: of the longest sequence, or of the longest block if lengths are rounded up.
        blocks: the rectangles, longest first.
        gather_P: for each cell of the blocks, row by row, its packed token (any token for padding); None if the packed
            order is already that of one unpadded block.
        scatter_T: for each packed token, its cell in the blocks.
        causal_B: as given; None if no sequence is causal.
        hides_keys: whether tokens of some sequences attend only to the first tokens of their sequence.
    """

    cu_seqlens_B1: Tensor
    max_length: int
    blocks: tuple[AttentionBlock, ...]
    gather_P: Tensor | None
    scatter_T: Tensor | None
    causal_B: BoolArray | None = None
    hides_keys: bool = False

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens_B1.numel() - 1

    def as_one_block(self) -> PackedSequences:
        """The same sequences in one block, in their own order, to record all attention maps at once."""
        assert not self.hides_keys, "attention maps of sequences with hidden keys are not recorded"
        device = self.cu_seqlens_B1.device
        lengths_B = self.cu_seqlens_B1.diff().cpu().numpy()
        return PackedSequences.from_lengths(lengths_B, shortest_share=0.0, causal_B=self.causal_B).to(device)

    def as_one_masked_block(self) -> PackedSequences:
        """The same sequences in one block, in their own order, with a mask where there is padding."""
        lengths_B = self.cu_seqlens_B1.diff().cpu().numpy()
        return PackedSequences.from_groups(lengths_B, [np.arange(lengths_B.size)]).to(self.cu_seqlens_B1.device)

    def as_causal(self) -> PackedSequences:
        """The same sequences in the same blocks, with causal attention."""
        device = self.cu_seqlens_B1.device
        blocks = tuple(
            replace(block, causal_b=torch.ones(block.sequences, dtype=torch.bool, device=device))
            for block in self.blocks
        )
        return replace(self, blocks=blocks, causal_B=np.ones(self.num_sequences, dtype=np.bool_))

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | Int64Array,
        *,
        shortest_share: float = 1 - BLOCK_WASTE,
        independent: bool = False,
        causal_B: BoolArray | None = None,
        keys_B: Int64Array | None = None,
    ) -> PackedSequences:
        """Plan the blocks for sequences of these lengths (each at least 1).

        Args:
            lengths: tokens of each sequence.
            shortest_share: each sequence of a block has at least this share of the length of the longest one; with 0
                there is one block, in the order of the sequences.
            independent: the shape in which attention computes a sequence does not depend on other sequences. The block
                length is the sequence's own, rounded up by `own_block_length`; the block always has a mask, and a
                sequence that is alone in its block is there twice, since torch lays out products of one matrix
                differently.
            causal_B: sequences whose tokens attend only to themselves and earlier tokens; None: none.
            keys_B: all tokens of a sequence attend to this many of its first tokens, and to no others; None: to all.
        """
        lengths_B = np.asarray(lengths, dtype=np.int64)
        row_B = own_block_length(lengths_B) if independent else lengths_B
        longest = int(row_B.max())
        if not independent and keys_B is None and int(lengths_B.min()) == longest:
            cu_tensor = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths_B)]).astype(np.int32))
            block = AttentionBlock(lengths_B.size, longest, None, _causal(causal_B, np.arange(lengths_B.size)))
            return cls(cu_tensor, longest, (block,), None, None, causal_B)
        order_B = np.argsort(-lengths_B, kind="stable") if shortest_share > 0 else np.arange(lengths_B.size)
        groups: list[Int64Array] = []
        first = 0
        while first < order_B.size:
            length = int(row_B[order_B[first:]].max())
            fits = row_B[order_B[first:]] >= (length if independent else np.ceil(length * shortest_share))
            members_b = order_B[first : first + int(fits.sum())]
            first += members_b.size
            groups.append(members_b.repeat(2) if independent and members_b.size == 1 else members_b)
        return cls.from_groups(lengths_B, groups, independent=independent, causal_B=causal_B, keys_B=keys_B)

    @classmethod
    def from_groups(
        cls,
        lengths: Sequence[int] | Int64Array,
        groups: Sequence[Int64Array],
        *,
        independent: bool = False,
        causal_B: BoolArray | None = None,
        keys_B: Int64Array | None = None,
    ) -> PackedSequences:
        """One block per group of sequences, in the given order; each sequence is in exactly one group. The other
        arguments are those of `from_lengths`."""
        lengths_B = np.asarray(lengths, dtype=np.int64)
        row_B = own_block_length(lengths_B) if independent else lengths_B
        cu_seqlens_B1 = np.concatenate([[0], np.cumsum(lengths_B)])
        blocks: list[AttentionBlock] = []
        gathers: list[Int64Array] = []
        scatter_T = np.empty(int(cu_seqlens_B1[-1]), dtype=np.int64)
        offset = 0
        for members_b in groups:
            token_bS, real_bS = _cells(cu_seqlens_B1, lengths_B, members_b, int(row_B[members_b].max()))
            scatter_T[token_bS[real_bS]] = offset + np.flatnonzero(real_bS)
            gathers.append(token_bS.ravel())
            seen_bS = real_bS if keys_B is None else np.arange(real_bS.shape[1]) < keys_B[members_b, None]
            mask = None if not independent and seen_bS.all() else torch.from_numpy(seen_bS[:, None, None, :].copy())
            blocks.append(AttentionBlock(members_b.size, real_bS.shape[1], mask, _causal(causal_B, members_b)))
            offset += token_bS.size
        gather_P = torch.from_numpy(np.concatenate(gathers))
        longest, cu_tensor = int(row_B.max()), torch.from_numpy(cu_seqlens_B1.astype(np.int32))
        hides_keys = keys_B is not None and bool((keys_B < lengths_B).any())
        return cls(cu_tensor, longest, tuple(blocks), gather_P, torch.from_numpy(scatter_T), causal_B, hides_keys)

    def to(self, device: torch.device) -> PackedSequences:
        return moved(self, device)


def _causal(causal_B: BoolArray | None, members_b: Int64Array) -> Tensor | None:
    """Which of these sequences are causal, (b,); None if none is."""
    return None if causal_B is None or not causal_B[members_b].any() else torch.from_numpy(causal_B[members_b])


def _cells(
    cu_seqlens_B1: Int64Array, lengths_B: Int64Array, members_b: Int64Array, length: int
) -> tuple[Int64Array, BoolArray]:
    """The packed token of each cell of a block, (b, S), and whether the cell is a token rather than padding."""
    column_S = np.arange(length)
    real_bS = column_S < lengths_B[members_b, None]
    return cu_seqlens_B1[members_b, None] + np.where(real_bS, column_S, 0), real_bS


@dataclass(frozen=True)
class SourceTarget:
    """How an encoder-decoder reads sequences: the encoder reads the first tokens of each, the decoder the rest.

    Attributes:
        source, target: bounds and blocks of either side, whose tokens are end to end.
        source_tokens: of all sequences.
        index_T: the packed tokens, those of the sources first.
        place_T: its inverse: the position of each packed token in that order.
        queries, keys: the targets and the sources in blocks with the same members, for cross-attention.
    """

    source: PackedSequences
    target: PackedSequences
    source_tokens: int
    index_T: Tensor
    place_T: Tensor
    queries: PackedSequences
    keys: PackedSequences

    @classmethod
    def from_lengths(cls, source: Sequence[int] | Int64Array, target: Int64Array) -> SourceTarget:
        """From the number of tokens (each at least 1) of each sequence on either side."""
        source_B, target_B = np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64)
        sequence_T = np.repeat(np.arange(source_B.size), source_B + target_B)
        starts_B = np.cumsum(source_B + target_B) - source_B - target_B
        is_target_T = np.arange(sequence_T.size) - starts_B[sequence_T] >= source_B[sequence_T]
        index_T = np.argsort(is_target_T, kind="stable")
        groups = [
            members_c
            for members_b in _alike(np.arange(target_B.size), target_B)
            for members_c in _alike(members_b, source_B)
        ]
        return cls(
            PackedSequences.from_lengths(source_B),
            PackedSequences.from_lengths(target_B),
            int(source_B.sum()),
            torch.from_numpy(index_T),
            torch.from_numpy(np.argsort(index_T, kind="stable")),
            PackedSequences.from_groups(target_B, groups),
            PackedSequences.from_groups(source_B, groups),
        )

    def sides(self, rows_T: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the packed tokens, split into those of the sources and those of the targets."""
        ordered_T = rows_T.index_select(0, self.index_T)
        return ordered_T[: self.source_tokens], ordered_T[self.source_tokens :]


def _alike(members_b: Int64Array, lengths_B: Int64Array) -> list[Int64Array]:
    """The sequences in groups of similar lengths, longest first, as `BLOCK_WASTE` allows."""
    left = members_b[np.argsort(-lengths_B[members_b], kind="stable")]
    groups = []
    while left.size:
        fits = lengths_B[left] >= np.ceil(lengths_B[left[0]] * (1 - BLOCK_WASTE))
        groups.append(left[fits])
        left = left[~fits]
    return groups


@dataclass(frozen=True)
class TokenTargets:
    """`bertkit.data.samples.Targets` as tensors: what one objective predicts, and where."""

    index_M: Tensor
    id_M: Tensor
    places: Mapping[str, Tensor] = field(default_factory=dict)
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def from_samples(cls, targets: Targets) -> TokenTargets:
        return cls(
            _tensor(targets.index_M),
            _tensor(targets.id_M),
            {name: _tensor(place_M) for name, place_M in targets.places.items()},
            {name: _tensor(column_M) for name, column_M in targets.columns.items()},
        )

    @property
    def count(self) -> int:
        return self.id_M.numel()


@dataclass(frozen=True)
class BatchLanes:
    """`bertkit.data.samples.Lanes` as tensors: which text sequences continue, and which are read right to left."""

    number_B: Tensor
    reversed_B: Tensor
    reused_tokens: int


@dataclass(frozen=True)
class PackedBatch:
    """The input of a model and the targets of objectives.

    Attributes:
        ids_T, token_types_T, positions_T: int64.
        sequences: their bounds and blocks.
        targets: of tokens, by objective.
        labels: of sequences, by objective, each of shape B.
        global_T: bool, tokens that attend to all of their sequence and are attended to by all, for families with
            windowed attention; None: the family and its heads decide.
        lanes, ranks_T2, order_T4: as in `Samples`.
        pairs: the two sides of an encoder-decoder; None: there is no target side.
        host: the original of a batch that was moved to a GPU: what depends only on its targets and lengths can be read
            there without waiting for the GPU. None: this batch was not moved.
    """

    ids_T: Tensor
    token_types_T: Tensor
    positions_T: Tensor
    sequences: PackedSequences
    targets: Mapping[str, TokenTargets]
    labels: Mapping[str, Tensor]
    global_T: Tensor | None = None
    lanes: BatchLanes | None = None
    ranks_T2: Tensor | None = None
    order_T4: Tensor | None = None
    pairs: SourceTarget | None = None
    host: PackedBatch | None = None

    @property
    def num_tokens(self) -> int:
        return self.ids_T.numel()

    @property
    def num_sequences(self) -> int:
        return self.sequences.num_sequences

    @property
    def num_items(self) -> int:
        """The number of sequences: a batch is split between sequences."""
        return self.num_sequences

    @property
    def first_token_B(self) -> Tensor:
        """The packed position of each sequence's first token, where a classifier reads."""
        return self.sequences.cu_seqlens_B1[:-1].long()

    @classmethod
    def from_samples(cls, samples: Samples) -> PackedBatch:
        start_B = samples.decoder_start_B
        return cls(
            ids_T=_tensor(samples.ids_T),
            token_types_T=_tensor(samples.token_types_T),
            positions_T=_tensor(samples.side_position_T),
            sequences=PackedSequences.from_lengths(samples.lengths_B, causal_B=samples.causal_B),
            targets={term: TokenTargets.from_samples(targets) for term, targets in samples.targets.items()},
            labels={name: _tensor(label_B) for name, label_B in samples.labels.items()},
            lanes=None
            if samples.lanes is None
            else BatchLanes(
                _tensor(samples.lanes.number_B), _tensor(samples.lanes.reversed_B), samples.lanes.reused_tokens
            ),
            ranks_T2=None if samples.ranks_T2 is None else _tensor(samples.ranks_T2),
            order_T4=None if samples.order_T4 is None else _tensor(samples.order_T4),
            pairs=None if start_B is None else SourceTarget.from_lengths(start_B, samples.lengths_B - start_B),
        )

    @classmethod
    def from_pairs(cls, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> PackedBatch:
        """A batch of given token ids for an encoder-decoder, without targets for a loss."""
        batch = cls.from_ids([[*source, *target] for source, target in zip(sources, targets, strict=True)])
        source_B, target_B = ([len(row) for row in rows] for rows in (sources, targets))
        positions = [torch.arange(length) for pair in zip(source_B, target_B, strict=True) for length in pair]
        pairs = SourceTarget.from_lengths(source_B, np.array(target_B))
        return replace(batch, positions_T=torch.cat(positions), pairs=pairs)

    @classmethod
    def from_ids(
        cls,
        ids: Sequence[Sequence[int]],
        token_types: Sequence[Sequence[int]] | None = None,
        *,
        causal: bool = False,
        independent: bool = False,
        keys: Sequence[int] | Int64Array | None = None,
    ) -> PackedBatch:
        """A batch of given token ids without targets, for inference; `causal` sequences are read left to right only.

        `independent` and `keys`: see `PackedSequences.from_lengths`.
        """
        if not ids or not all(len(sequence) for sequence in ids):
            raise ValueError("a batch needs at least one sequence, and every sequence at least one token")
        lengths_B = [len(sequence) for sequence in ids]
        ids_T = torch.tensor([token for sequence in ids for token in sequence], dtype=torch.int64)
        if token_types is None:
            token_types_T = torch.zeros_like(ids_T)
        else:
            token_types_T = torch.tensor([kind for sequence in token_types for kind in sequence], dtype=torch.int64)
        return cls(
            ids_T=ids_T,
            token_types_T=token_types_T,
            positions_T=torch.cat([torch.arange(length) for length in lengths_B]),
            sequences=PackedSequences.from_lengths(
                lengths_B,
                independent=independent,
                causal_B=np.ones(len(lengths_B), dtype=np.bool_) if causal else None,
                keys_B=None if keys is None else np.asarray(keys, dtype=np.int64),
            ),
            targets={},
            labels={},
        )

    def pin_memory(self) -> PackedBatch:
        """The batch in pinned memory; called by torch's DataLoader."""
        return pinned(self)

    def to(self, device: torch.device) -> PackedBatch:
        if device == self.ids_T.device:
            return self
        host = self if self.host is None else self.host
        return replace(moved(replace(self, host=None), device), host=host)


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def sequence_keys(batch: PackedBatch) -> list[bytes]:
    """A 16-byte key for each sequence of a batch, from its ids, its token types and whether it is causal."""
    columns_T2 = np.stack([batch.ids_T.cpu().numpy(), batch.token_types_T.cpu().numpy()], axis=1)
    ends = batch.sequences.cu_seqlens_B1.cpu().tolist()
    causal_B = batch.sequences.causal_B
    is_causal_B = [False] * batch.num_sequences if causal_B is None else causal_B.tolist()
    return [
        hashlib.blake2b(columns_T2[start:end].tobytes(), digest_size=16, person=b"causal" * is_causal).digest()
        for (start, end), is_causal in zip(pairwise(ends), is_causal_B, strict=True)
    ]


def batches_by_length(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Indices of the sequences, longest first, in batches of at most `most_tokens` tokens."""
    batches: list[list[int]] = []
    tokens = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if not batches or tokens + lengths[number] > most_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(number)
        tokens += lengths[number]
    return batches
