"""Packed batches: which token, sequence and side each cell of a block holds, against plain loops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bertkit.data.batch import PackedBatch, PackedSequences, SourceTarget, batches_by_length, sequence_keys

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def members_of(sequences: PackedSequences) -> list[list[int]]:
    """The sequence of each row of each block."""
    if sequences.gather_P is None:
        return [list(range(sequences.num_sequences))]
    sequence_T = torch.repeat_interleave(torch.arange(sequences.num_sequences), sequences.cu_seqlens_B1.diff())
    cells = sequences.gather_P.split([block.sequences * block.length for block in sequences.blocks])
    return [
        sequence_T[cell_P.view(block.sequences, block.length)[:, 0]].tolist()
        for cell_P, block in zip(cells, sequences.blocks, strict=True)
    ]


@given(LENGTHS)
@example([3, 1])
def test_a_block_ends_where_a_sequence_would_be_padded_by_more_than_a_quarter(lengths: list[int]) -> None:
    blocks = [[lengths[number] for number in members] for members in members_of(PackedSequences.from_lengths(lengths))]
    assert sorted(length for block in blocks for length in block) == sorted(lengths)
    assert all(4 * min(block) >= 3 * max(block) for block in blocks)
    assert all(4 * max(block) < 3 * max(before) for before, block in pairwise(blocks))
    one = PackedSequences.from_lengths(lengths, shortest_share=0.0)
    assert members_of(one) == [list(range(len(lengths)))]
    assert one.gather_P is None or one.gather_P.max() < sum(lengths), "padding reads some token, too"


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.booleans()), min_size=1, max_size=9))
def test_masks_show_the_given_keys_and_blocks_know_their_causal_sequences(
    drawn: list[tuple[int, int, bool]],
) -> None:
    lengths = [length for length, _, _ in drawn]
    keys_B = np.array([min(keys, length) for length, keys, _ in drawn])
    causal_B = np.array([is_causal for *_, is_causal in drawn])
    sequences = PackedSequences.from_lengths(lengths, causal_B=causal_B, keys_B=keys_B)
    for members, block in zip(members_of(sequences), sequences.blocks, strict=True):
        seen = np.arange(block.length) < keys_B[members][:, None]
        mask = np.ones_like(seen) if block.mask_b11S is None else block.mask_b11S[:, 0, 0].numpy()
        assert np.array_equal(mask, seen)
        causal = np.zeros(len(members), bool) if block.causal_b is None else block.causal_b.numpy()
        assert np.array_equal(causal, causal_B[members])
    assert sequences.hides_keys == bool((keys_B < lengths).any())


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=10))
def test_the_sides_of_pairs_are_their_first_and_their_last_tokens(lengths: list[tuple[int, int]]) -> None:
    sources, targets = [], []
    start = 0
    for source, target in lengths:
        sources += range(start, start + source)
        targets += range(start + source, start + source + target)
        start += source + target
    pairs = SourceTarget.from_lengths([source for source, _ in lengths], np.array([target for _, target in lengths]))
    source_s, target_t = pairs.sides(torch.arange(start))
    assert (source_s.tolist(), target_t.tolist()) == (sources, targets)
    assert torch.equal(torch.cat([source_s, target_t])[pairs.place_T], torch.arange(start))
    assert (pairs.source.num_sequences, int(pairs.target.cu_seqlens_B1[-1])) == (len(lengths), len(targets))
    assert members_of(pairs.queries) == members_of(pairs.keys), "a target attends to its own source"
    for side, sequences in enumerate((pairs.keys, pairs.queries)):
        for members in members_of(sequences):
            own = [lengths[number][side] for number in members]
            assert 4 * min(own) >= 3 * max(own)


@given(LENGTHS, st.integers(1, 60))
def test_batches_are_filled_with_the_longest_first(lengths: list[int], most: int) -> None:
    batches = batches_by_length(lengths, most)
    ordered = [number for batch in batches for number in batch]
    assert sorted(ordered) == list(range(len(lengths)))
    assert [lengths[number] for number in ordered] == sorted(lengths, reverse=True)
    sums = [sum(lengths[number] for number in batch) for batch in batches]
    assert all(tokens <= most or len(batch) == 1 for tokens, batch in zip(sums, batches, strict=True))
    assert all(tokens + lengths[batch[0]] > most for tokens, batch in zip(sums, batches[1:], strict=False))


def test_a_sequence_has_the_key_of_its_content_wherever_it_is() -> None:
    ids, kinds = [[5, 6, 7], [5, 6], [5, 6, 7], [5, 6, 7]], [[0, 0, 0], [0, 0], [0, 0, 1], [0, 0, 0]]
    keys = sequence_keys(PackedBatch.from_ids(ids, kinds))
    assert keys[0] == keys[3] == sequence_keys(PackedBatch.from_ids([[5, 6, 7]]))[0]
    assert len({*keys, *sequence_keys(PackedBatch.from_ids([[5, 6, 7]], causal=True))}) == 4
    assert all(len(key) == 16 for key in keys)


def test_a_batch_of_pairs_counts_positions_from_0_on_either_side() -> None:
    batch = PackedBatch.from_pairs([[1, 2, 3], [4]], [[5, 6], [7]])
    assert batch.ids_T.tolist() == [1, 2, 3, 5, 6, 4, 7]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1, 0, 0]
    with pytest.raises(ValueError, match="at least one token"):
        PackedBatch.from_ids([[1], []])
