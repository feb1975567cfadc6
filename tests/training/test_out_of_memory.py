"""Out of memory: an update is split into smaller micro-batches with the same result on every rank, or fails with a
message.

Memory that runs out is simulated: torch's error is raised if a micro-batch has more tokens than would fit.
"""

from __future__ import annotations

import gc
import logging
import pickle
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.errors import is_out_of_memory
from bertkit.files import sha256_of
from bertkit.models.loss_sum import LossSum
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import silent_progress
from bertkit.ranks import Ranks, use_ranks
from bertkit.recipe.resolve import Override
from bertkit.run.directory import RunDirectory
from bertkit.run.metrics import read_metrics
from bertkit.training.optimizers import AdamWConfig
from bertkit.training.out_of_memory import MicroBatchMemoryError
from tests.conftest import Outcome
from tests.pretraining.test_growing_run import RECIPE
from tests.training.test_step import TERMS, corrupted, small_model, step_of
from tests.training.tiny_run import write_text

MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    " 4096 bytes. Error code 12 (Cannot allocate memory)"
)


class Memory:
    """Simulated memory with room for a micro-batch of this many tokens, from a given pass on.

    Attributes:
        refused: number of tokens of the micro-batches that did not fit, in order.
        computed: tensors that the refused ones had computed.
    """

    def __init__(self, tokens: int, *, from_pass: int = 0) -> None:
        self.tokens = tokens
        self.from_pass = from_pass
        self.passes = 0
        self.refused: list[int] = []
        self.computed: list[weakref.ref[torch.Tensor]] = []

    def losses(self, terms: ObjectiveTerms, model: Any, batch: PackedBatch, **others: Any) -> Mapping[str, LossSum]:
        """Replaces the terms' own method."""
        losses = PLAIN_LOSSES(terms, model, batch, **others)
        if not torch.is_grad_enabled():
            return losses
        self.passes += 1
        if self.passes > self.from_pass and batch.num_tokens > self.tokens:
            self.refused.append(batch.num_tokens)
            self.computed = [weakref.ref(loss.sum) for loss in losses.values()]
            raise RuntimeError(MESSAGE)
        return losses


PLAIN_LOSSES = ObjectiveTerms.losses


def limited(monkeypatch: pytest.MonkeyPatch, memory: Memory) -> Memory:
    def losses(terms: ObjectiveTerms, model: Any, batch: PackedBatch, recorder: Any = None, **others: Any) -> Any:
        return memory.losses(terms, model, batch, recorder=recorder, **others)

    monkeypatch.setattr(ObjectiveTerms, "losses", losses)
    return memory


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("memory")
    (directory / "stacked.yaml").write_text(RECIPE, encoding="utf-8")
    write_text(directory / "text.txt")
    return directory


def trained(home: Path, name: str, **settings: Any) -> RunDirectory:
    """A run of nine updates whose model grows twice, each time by an update of its own stage."""
    arguments = PretrainArguments(
        str(home / "stacked.yaml"),
        sources=[str(home / "text.txt")],
        run_dir=home / name,
        cache=home / "cache",
        command=["test"],
        overrides=[Override(key, value) for key, value in settings.items()],
    )
    return run_pretraining(arguments, progress=silent_progress).run


def losses_of(run: RunDirectory) -> list[float]:
    return [line["loss"] for line in read_metrics(run.metrics) if "loss" in line]


def test_a_run_that_is_cut_smaller_ends_like_one_that_was_so_from_the_beginning(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit for bit, dropout included: the generators are restored to their state before the failed update."""
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        memory = limited(patch, Memory(30))
        cut = trained(home, "cut", **{"engine.micro_batch_tokens": 160})
    (largest,) = memory.refused
    tokens = largest // 2
    warnings = [message for message in caplog.messages if "out of memory" in message]
    assert len(warnings) == 1
    assert f"write engine.micro_batch_tokens: {tokens} into the recipe" in warnings[0]
    small = trained(home, "small", **{"engine.micro_batch_tokens": tokens})
    assert sha256_of(cut.model / "model.safetensors") == sha256_of(small.model / "model.safetensors")
    assert losses_of(cut) == losses_of(small)


def test_the_update_in_which_a_model_grows_is_cut_without_growing_twice(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model.hidden_dropout_prob": 0, "model.attention_probs_dropout_prob": 0, "engine.precision": "fp32"}
    plain = trained(home, "plain", **settings)
    with monkeypatch.context() as patch:
        memory = limited(patch, Memory(60, from_pass=3))  # the first stage has three updates
        cut = trained(home, "grown", **settings)
    assert memory.refused
    assert losses_of(cut) == pytest.approx(losses_of(plain), rel=1e-4)


def test_what_a_failed_micro_batch_computed_is_freed_before_the_update_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = limited(monkeypatch, Memory(100))
    model = small_model(101)
    gc.disable()
    try:
        with pytest.raises(MicroBatchMemoryError) as caught:
            step_of(model, AdamWConfig()).update([PackedBatch.from_samples(corrupted(0, 101))], TERMS, 1e-3)
        assert memory.computed
        assert [kept() for kept in memory.computed] == [None] * len(memory.computed)
    finally:
        gc.enable()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert caught.value.smaller(4096) == memory.refused[0] // 2


class BesideAnother(Ranks):
    """The first of two ranks, the other of which runs out of memory with larger micro-batches."""

    count = 2

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        return [count + 1 for count in counts]

    def gathered(self, value: Any) -> list[Any]:
        return [value, (MESSAGE, 300, 9)]


def test_a_rank_whose_memory_suffices_cuts_with_the_one_whose_memory_does_not() -> None:
    model = small_model(101)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).clone()
    with use_ranks(BesideAnother()), pytest.raises(MicroBatchMemoryError) as caught:
        step_of(model, AdamWConfig()).update([PackedBatch.from_samples(corrupted(0, 101))], TERMS, 1e-3)
    assert caught.value.smaller(4096) == 150
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), before)


def test_a_single_sequence_that_does_not_fit_ends_the_run_with_what_to_change(
    home: Path, monkeypatch: pytest.MonkeyPatch, bertkit: Any
) -> None:
    memory = limited(monkeypatch, Memory(4))
    monkeypatch.setenv("BERTKIT_CACHE", str(home / "cache"))
    outcome: Outcome = bertkit(
        "pretrain", home / "stacked.yaml", "--data", home / "text.txt", "--run-dir", home / "ended"
    )
    assert outcome.code == 3
    assert "a single sequence of" in outcome.stderr
    assert "engine.activation_checkpointing" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert len(memory.refused) < 5, "it is halved down to a single sequence"


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True),
        (MemoryError(), True),
        (RuntimeError(MESSAGE), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_what_memory_causes_is_taken_for_it(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory


def test_another_error_of_an_update_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(*arguments: Any, **others: Any) -> Any:
        raise RuntimeError("expected scalar type Float but found Half")

    monkeypatch.setattr(ObjectiveTerms, "losses", losses)
    with pytest.raises(RuntimeError, match="scalar type"):
        step_of(small_model(101), AdamWConfig()).update([PackedBatch.from_samples(corrupted(0, 101))], TERMS, 1e-3)


def test_the_error_comes_back_from_the_process_of_a_job() -> None:
    error = pickle.loads(pickle.dumps(MicroBatchMemoryError("no room", 512, 3)))
    assert (str(error), error.tokens, error.items) == (str(MicroBatchMemoryError("no room", 512, 3)), 512, 3)
