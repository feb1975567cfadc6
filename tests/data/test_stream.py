"""The stream of batches: the same for any workers and from any step, complete epochs, separate held-out text."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from bertkit.code_hash import code_sha256
from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.data.layouts import DocSentences, SegmentPair
from bertkit.data.shards import TokenShards
from bertkit.data.split import split_documents
from bertkit.data.stream import _CODE_OF_PLANS, SampleSpec, SampleStream, StepBatches
from bertkit.errors import DataError
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.schedule import LinearRate
from tests.data.toy_corpus import FIRST_ID, random_documents, vocabulary, whole_documents, write_shards

BATCH = 13


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return write_shards(tmp_path_factory.mktemp("shards"), random_documents(97))


def step_batches(shards: TokenShards, plans: Path | None = None, **changes: object) -> StepBatches:
    settings = {"seed": 3, "scope": "train/0", "layout": SegmentPair(), "sequence_length": 48, "static_copies": None}
    stream = SampleStream(SampleSpec(**{**settings, **changes}), shards, whole_documents(shards), plans)  # type: ignore[arg-type]  # a table of mixed settings
    return StepBatches(stream, vocabulary(), [MaskedLM()], batch_sequences=BATCH, micro_batch_tokens=200)


CHANGING = MaskedLM(rate=LinearRate(start=0.6, end=0.1))


def changing_batches(shards: TokenShards, *, first_step: int, run_steps: int) -> StepBatches:
    batches = step_batches(shards)
    return StepBatches(
        batches.stream,
        vocabulary(),
        [CHANGING],
        batch_sequences=BATCH,
        micro_batch_tokens=200,
        first_step=first_step,
        run_steps=run_steps,
    )


def flat(batches: list[PackedBatch]) -> list[torch.Tensor]:
    return [
        tensor
        for batch in batches
        for tensor in (
            batch.ids_T,
            batch.token_types_T,
            *(tensor for part in batch.targets.values() for tensor in (part.index_M, part.id_M)),
            *batch.labels.values(),
        )
    ]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 4])
def test_any_number_of_workers_gives_the_same_batches(shards: TokenShards, workers: int, tmp_path: Path) -> None:
    steps = range(7, 60)  # over several epochs
    alone = list(step_batches(shards).loader(steps, workers=0))
    together = list(step_batches(shards, tmp_path).loader(steps, workers=workers))
    assert len(alone) == len(together) == len(steps)
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(flat(one), flat(other), strict=True))


def test_a_step_does_not_depend_on_those_before_it(shards: TokenShards) -> None:
    walked = list(step_batches(shards).loader(range(50), workers=0))[-1]
    jumped = step_batches(shards)[49]
    assert all(torch.equal(a, b) for a, b in zip(flat(walked), flat(jumped), strict=True))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_rate_that_changes_is_that_of_the_step_for_any_workers_and_from_any_step(shards: TokenShards) -> None:
    batches = changing_batches(shards, first_step=40, run_steps=100)
    steps = range(60)
    alone = list(batches.loader(steps, workers=0))
    from_the_middle = [None] * 25 + list(batches.loader(steps[25:], workers=2))
    for step, (one, other) in enumerate(zip(alone, from_the_middle, strict=True)):
        rate = 0.6 - 0.5 * (40 + step) / 100
        constant = step_batches(shards)
        constant.corruptions = (MaskedLM(rate=rate),)
        assert all(torch.equal(a, b) for a, b in zip(flat(one), flat(constant[step]), strict=True))
        if other is not None:
            assert all(torch.equal(a, b) for a, b in zip(flat(one), flat(other), strict=True))


def test_the_generator_of_dropout_is_left_alone(shards: TokenShards) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(step_batches(shards).loader(range(3), workers=1))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_workers_are_children_of_the_run_whatever_pythons_default_is(shards: TokenShards) -> None:
    """Else they would not notice that it was killed; forkserver is the default from Python 3.14 on."""
    default = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        batches = step_batches(shards).loader(range(20), workers=1)
        next(batches)
        parents = {psutil.Process(worker.pid).ppid() for worker in multiprocessing.active_children()}
        assert parents == {os.getpid()}
    finally:
        multiprocessing.set_start_method(default, force=True)


def test_an_epoch_visits_every_sample_once_in_an_order_of_its_own(shards: TokenShards) -> None:
    stream = step_batches(shards, layout=DocSentences()).stream
    length = stream.epoch_length(0)
    epochs = [stream.samples(epoch * length, length, vocabulary()).sample_B for epoch in (0, 1)]
    for order in epochs:
        np.testing.assert_array_equal(np.sort(order), np.arange(length))
    assert not np.array_equal(*epochs)
    across = stream.samples(length - 5, 12, vocabulary()).sample_B
    np.testing.assert_array_equal(across, [*epochs[0][-5:], *epochs[1][:7]])
    np.testing.assert_array_equal(epochs[0], stream.spec.draw.permuted("order", np.arange(length), size=length))


def test_static_copies_come_round_again_and_dynamic_masks_do_not(shards: TokenShards) -> None:
    """A layout without draws, so a sample of one epoch can be found in another."""
    masked = {}
    for copies in (2, None):
        batches = step_batches(shards, layout=DocSentences(), static_copies=copies)
        length = batches.stream.epoch_length(0)
        epochs = []
        for epoch in range(4):
            samples = batches.stream.samples(epoch * length, length, vocabulary())
            samples = MaskedLM().corrupt(samples, vocabulary(), batches.stream.spec.draw)
            parts = {int(part.sample_B[0]): tuple(part.ids_T) for part in samples.split(1)}
            epochs.append([parts[row] for row in range(length)])
        masked[copies] = epochs
    assert masked[2][0] == masked[2][2] != masked[2][1] == masked[2][3]
    assert len({tuple(epoch) for epoch in masked[None]}) == 4


def test_micro_batches_are_the_batch_cut_between_sequences(shards: TokenShards) -> None:
    batches = step_batches(shards)
    whole, parts = batches.samples(4), batches[4]
    assert torch.equal(torch.cat([part.ids_T for part in parts]), torch.from_numpy(whole.ids_T))
    assert sum(part.num_sequences for part in parts) == BATCH
    assert all(part.num_tokens <= 200 for part in parts)
    assert len(parts) > 1


def test_a_corpus_shorter_than_one_batch_is_refused_with_a_remedy(tmp_path: Path) -> None:
    few = write_shards(tmp_path, [[5, 9, 7], [4, 4]])
    with pytest.raises(DataError, match=r"fewer than one batch of 13.*optimisation\.batch_sequences"):
        step_batches(few).check_enough()


@pytest.mark.parametrize("documents", [400, 7])
def test_held_out_text_is_never_trained_on(documents: int, tmp_path: Path) -> None:
    corpus = write_shards(tmp_path, random_documents(documents))
    training, held_out = split_documents(corpus, 0.05, seed=1)
    positions = []
    for ranges in (training, held_out):
        stream = SampleStream(SampleSpec(0, "x", DocSentences(), 48, None), corpus, ranges, None)
        samples = stream.samples(0, stream.epoch_length(0), vocabulary())
        positions.append(set((samples.ids_T[~samples.special_T] - FIRST_ID).tolist()))
    assert not positions[0] & positions[1]
    assert len(positions[0]) + len(positions[1]) == corpus.tokens
    assert 0 < len(positions[1]) < 0.2 * corpus.tokens


def test_one_document_is_held_out_from_at_its_end(tmp_path: Path) -> None:
    corpus = write_shards(tmp_path, [[3] * 200])
    training, held_out = split_documents(corpus, 0.01, seed=0)
    assert training.tolist() == [[0, 198]]
    assert held_out.tolist() == [[198, 200]]


def test_blocks_hold_every_token_once_and_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 129, 57)
    sequences = PackedSequences.from_lengths(lengths)
    assert sequences.gather_P is not None
    assert sequences.scatter_T is not None
    tokens = int(lengths.sum())
    assert torch.equal(sequences.gather_P[sequences.scatter_T], torch.arange(tokens))
    cells = sum(block.sequences * block.length for block in sequences.blocks)
    assert cells == sequences.gather_P.numel() < 1.25 * tokens
    real = sum(
        int(block.mask_b11S.sum()) if block.mask_b11S is not None else block.sequences * block.length
        for block in sequences.blocks
    )
    assert real == tokens


def test_sequences_of_one_length_need_no_gathering() -> None:
    sequences = PackedSequences.from_lengths([9] * 5)
    assert sequences.gather_P is None
    assert [(block.sequences, block.length) for block in sequences.blocks] == [(5, 9)]


def test_a_plan_that_other_code_made_is_not_read(
    shards: TokenShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = flat(step_batches(shards, tmp_path)[0])
    (made,) = tmp_path.glob("*/plan-00000.npy")
    np.save(made, np.load(made)[:1])
    assert len(step_batches(shards, tmp_path).stream.plan(0)) == 1
    monkeypatch.setattr("bertkit.data.stream.code_sha256", lambda *parts: "other code")
    assert all(map(torch.equal, flat(step_batches(shards, tmp_path)[0]), wanted))
    assert len(list(tmp_path.glob("*/plan-00000.npy"))) == 2


def test_the_code_of_plans_is_found() -> None:
    assert len({code_sha256(part) for part in (*_CODE_OF_PLANS, "nothing")}) == len(_CODE_OF_PLANS) + 1
