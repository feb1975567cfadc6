"""The stream of training batches: step number in, batch out, for any number of workers.

Every batch is a pure function of (seed, stage, step): the epoch's plan lists the samples, a Feistel permutation orders
them, and counter-based draws corrupt them, by the objectives as they are at that point of the run. A resume therefore
needs no state, and torch's DataLoader may distribute steps over workers in any way.

Shapes: N documents, B sequences of a batch.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bertkit.arrays import save_rows
from bertkit.cache import identity_hash
from bertkit.code_hash import code_sha256
from bertkit.data.batch import PackedBatch
from bertkit.data.layouts import Address, Layout
from bertkit.data.layouts.base import Plan, Ranges
from bertkit.data.pinned import pinned
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.data.split import range_tokens
from bertkit.errors import DataError
from bertkit.files import one_at_a_time, replacing
from bertkit.ranks import current, share_of

log = logging.getLogger(__name__)

_CODE_OF_PLANS = ("data/layouts", "data/random.py", "data/shards.py")
"""The code that decides a plan, next to its settings: plans of other code are not read."""
_MANY_TOKENS = 100_000_000
"""Above this, a plan may take so long that a message tells of it: half a minute for pairs, if not compiled."""


class Corruption(Protocol):
    """The part of an objective that works on samples, in a worker: see `bertkit.objectives.base.Objective`."""

    @property
    def rank(self) -> int: ...

    def at(self, progress: float) -> Corruption: ...

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples: ...


class Sizes(Protocol):
    """The number of sequences of each step of a run: see `bertkit.training.batch_ramp.BatchSizes`."""

    def at(self, step: int) -> int: ...

    def before(self, step: int) -> int: ...


def corrupted(
    samples: Samples, corruptions: Sequence[Corruption], vocabulary: Vocabulary, draw: Draw, *, progress: float = 0.0
) -> Samples:
    """The samples after all corruptions, in the order of their ranks, as they are at this point of the run."""
    for corruption in sorted(corruptions, key=lambda each: each.rank):
        samples = corruption.at(progress).corrupt(samples, vocabulary, draw)
    return samples


@dataclass(frozen=True)
class SampleSpec:
    """What decides the samples of one stage. Plain data: sent to workers, and part of a plan's address."""

    seed: int
    scope: str
    layout: Layout
    sequence_length: int
    static_copies: int | None

    @property
    def draw(self) -> Draw:
        return Draw(self.seed, self.scope)

    def copy_of(self, epoch: int) -> int:
        """Which set of draws an epoch uses: its own, or one of the static copies in rotation."""
        return epoch if self.static_copies is None else epoch % self.static_copies


class SampleStream:
    """All samples of a stage in the order of training: epoch after epoch, each in its own permutation."""

    def __init__(
        self, spec: SampleSpec, shards: TokenShards, documents_N2: Ranges, plan_directory: Path | None
    ) -> None:
        self.spec = spec
        self.shards = shards
        self.documents_N2 = documents_N2
        self.plan_directory = plan_directory
        self._plan = lru_cache(maxsize=2)(self._make_plan)
        self._lengths: list[int] = []

    def __reduce__(self) -> tuple[type[SampleStream], tuple[SampleSpec, TokenShards, Ranges, Path | None]]:
        # A worker makes its own stream: everything cached here can be rebuilt from these arguments.
        return SampleStream, (self.spec, self.shards, self.documents_N2, self.plan_directory)

    @property
    def tokens(self) -> int:
        """Tokens of the text that the samples are made from."""
        return range_tokens(self.shards, self.documents_N2)

    def plan(self, epoch: int) -> Plan:
        """The plan of an epoch; stored on disk, so that it is made once for all workers and resumes."""
        return self._plan(self.spec.copy_of(epoch) if self.spec.layout.epoch_dependent else 0)

    def epoch_length(self, epoch: int) -> int:
        """Samples in an epoch."""
        while len(self._lengths) <= epoch:
            self._lengths.append(len(self.plan(len(self._lengths))))
        return self._lengths[epoch]

    def samples(self, first: int, count: int, vocabulary: Vocabulary) -> Samples:
        """Samples `first` to `first + count` of the stream, uncorrupted, with the addresses that key their draws."""
        plan_B, address = self.rows(first, count)
        return self.spec.layout.assemble(self.shards, plan_B, vocabulary, address)

    def rows(self, first: int, count: int) -> tuple[Plan, Address]:
        """Samples `first` to `first + count` as rows of their plans, with their addresses."""
        plans: list[Plan] = []
        addresses: list[Address] = []
        for epoch, offset, taken in self._runs(first, count):
            length = self.epoch_length(epoch)
            row_B = self.spec.draw.permuted_range("order", offset, offset + taken, size=length, epoch=epoch)
            plans.append(self.plan(epoch)[row_B])
            addresses.append(Address(np.full(taken, self.spec.copy_of(epoch)), row_B))
        address = Address(
            np.concatenate([part.epoch_B for part in addresses]), np.concatenate([part.sample_B for part in addresses])
        )
        return np.concatenate(plans), address

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """The stretch of the stream as (epoch, offset in it, number of samples)."""
        epoch, offset = 0, first
        while offset >= self.epoch_length(epoch):
            offset -= self.epoch_length(epoch)
            epoch += 1
        while count:
            taken = min(count, self.epoch_length(epoch) - offset)
            yield epoch, offset, taken
            count -= taken
            epoch, offset = epoch + 1, 0

    def _make_plan(self, copy: int) -> Plan:
        if self.plan_directory is None:
            plan = np.concatenate(list(self._parts_of(copy)))
            self._require_samples(len(plan))
            return plan
        path = self.plan_directory / self._address() / f"plan-{copy:05d}.npy"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(path.with_suffix(".lock"), path):
                if not path.exists():
                    with replacing(path) as file:
                        self._require_samples(save_rows(file, self._parts_of(copy)))
        stored: Plan = np.load(path, mmap_mode="r")
        return stored

    def _parts_of(self, copy: int) -> Iterator[Plan]:
        """The plan of an epoch in parts, so that its memory is bounded."""
        if (tokens := self.tokens) > _MANY_TOKENS:
            log.info(
                "listing the samples of pass %d over %s tokens, which is kept in the cache", copy + 1, f"{tokens:,}"
            )
        spec = self.spec
        return spec.layout.plan_parts(self.shards, self.documents_N2, spec.sequence_length, spec.draw, copy)

    def _require_samples(self, count: int) -> None:
        """Raise DataError if there are none."""
        if not count:
            raise DataError(
                f"{self.shards.name}: {self.shards.tokens} tokens of text are too few for a sample of layout"
                f" {self.spec.layout.choice!r} at sequence_length {self.spec.sequence_length}; give more text"
            )

    def _address(self) -> str:
        spec = self.spec
        decides = {
            "seed": spec.seed,
            "scope": spec.scope,
            "layout": spec.layout.model_dump(mode="json"),
            "sequence_length": spec.sequence_length,
            "shards": self.shards.fingerprint,
            "documents": hashlib.sha256(self.documents_N2.tobytes()).hexdigest(),
            "code": code_sha256(*_CODE_OF_PLANS),
        }
        return identity_hash(decides)


class StepBatches(Dataset[list[PackedBatch]]):
    """Step number in, that step's micro-batches out; with several ranks, only this rank's share of the sequences.

    A sample and its corruption depend only on its own address, so each rank makes only its share.

    Args:
        stream: of the stage's samples.
        vocabulary: of the tokenizer.
        corruptions: the stage's objectives.
        batch_sequences: per step; if batches grow, of a full step.
        micro_batch_tokens: a batch is split into parts of at most this many tokens; None: it is not split.
        first_step: the step of the run at which the stage begins.
        run_steps: of the whole run, for the progress at a step; None if no corruption changes during the run.
        sizes: sequences of each step of the run, if batches grow.
    """

    def __init__(
        self,
        stream: SampleStream,
        vocabulary: Vocabulary,
        corruptions: Sequence[Corruption],
        *,
        batch_sequences: int,
        micro_batch_tokens: int | None,
        first_step: int = 0,
        run_steps: int | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self.stream = stream
        self.vocabulary = vocabulary
        self.corruptions = tuple(corruptions)
        self.batch_sequences = batch_sequences
        self.micro_batch_tokens = micro_batch_tokens
        self.first_step = first_step
        self.run_steps = run_steps
        self.sizes = sizes
        self.rank, self.rank_count = current().rank, current().count  # plain numbers, because this is sent to workers

    def stretch(self, step: int) -> tuple[int, int]:
        """The first sample of a step of the stage, by its number in the stage's stream, and how many the step has."""
        if self.sizes is None:
            return step * self.batch_sequences, self.batch_sequences
        number = self.first_step + step
        return self.sizes.before(number) - self.sizes.before(self.first_step), self.sizes.at(number)

    def progress(self, step: int) -> float:
        """The share of the run's steps before a step of the stage, counted from 0."""
        return 0.0 if self.run_steps is None else (self.first_step + step) / self.run_steps

    def uncorrupted(self, step: int) -> Samples:
        """The whole batch of a step of the stage, uncorrupted."""
        return self.stream.samples(*self.stretch(step), self.vocabulary)

    def samples(self, step: int) -> Samples:
        """The whole batch of a step of the stage, corrupted, before it is split."""
        return self._corrupted(step, *self.stretch(step))

    def share(self, step: int) -> Samples | None:
        """This rank's part of `samples`; None if it has none because there are fewer sequences than ranks."""
        first, count = self.stretch(step)
        begin, end = share_of(count, self.rank, self.rank_count)
        return self._corrupted(step, first + begin, end - begin) if begin < end else None

    def _corrupted(self, step: int, first: int, count: int) -> Samples:
        """`count` samples of the stage's stream, corrupted as in this step."""
        samples = self.stream.samples(first, count, self.vocabulary)
        draw = self.stream.spec.draw
        return corrupted(samples, self.corruptions, self.vocabulary, draw, progress=self.progress(step))

    def __getitem__(self, step: int) -> list[PackedBatch]:
        samples = self.share(step)
        parts = () if samples is None else samples.split(self.micro_batch_tokens)
        return [PackedBatch.from_samples(part) for part in parts]

    def of(self, step: int, first: int) -> list[PackedBatch]:
        """The whole batch of a step of the stage, on other samples: those from this number of the stage's stream on."""
        samples = self._corrupted(step, first, self.stretch(step)[1])
        return [PackedBatch.from_samples(part) for part in samples.split(self.micro_batch_tokens)]

    def check_enough(self) -> None:
        """Raise DataError if the corpus is shorter than one batch."""
        length = self.stream.epoch_length(0)
        if length < self.batch_sequences:
            raise DataError(
                f"{self.stream.shards.name}: the text gives {length} samples of at most"
                f" {self.stream.spec.sequence_length} tokens, fewer than one batch of {self.batch_sequences}; give more"
                f" text, or --set optimisation.batch_sequences={max(1, length)} or less"
            )

    def loader(self, steps: range, *, workers: int, pin: bool = False) -> Iterator[list[PackedBatch]]:
        """The batches of these steps in order, prepared ahead: by a thread of this process, or by worker processes.

        Args:
            steps: of the stage.
            workers: processes; 0: a thread.
            pin: whether to use pinned memory.
        """
        if workers == 0:
            return prefetch(self.__getitem__, steps, pin=pin)
        # Python 3.14's default, forkserver, imports torch again for every stage, which takes seconds, and its workers
        # would outlive a killed run: torch's workers only notice the end of their parent process, the server.
        loader = DataLoader(
            self,
            batch_size=None,
            sampler=steps,
            num_workers=workers,
            multiprocessing_context="fork" if sys.platform == "linux" else None,
            prefetch_factor=PREFETCHED_BATCHES,
            worker_init_fn=_quiet_worker,
            pin_memory=pin,
            generator=torch.Generator(),  # the loader seeds its workers from this, not from the generator of dropout
        )
        return iter(loader)


def _quiet_worker(worker: int) -> None:
    """One thread per worker: the training step needs the cores. The parent handles signals."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


Made = TypeVar("Made")

PREFETCHED_BATCHES = 4
"""Number of steps for which batches are prepared in advance; per worker, if there are several."""


def prefetch(make: Callable[[int], Made], steps: range, *, pin: bool = False) -> Generator[Made, None, None]:
    """The results of `make` for these steps, in order; an error is raised when its step is requested.

    A caller that stops early must close the iterator, which waits for the batch that is being made.

    Args:
        make: returns the batches of a step; called in a thread.
        steps: in order.
        pin: whether to use pinned memory.
    """

    def made(step: int) -> Made:
        return pinned(make(step)) if pin else make(step)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as thread:
        waiting: deque[Future[Made]] = deque()
        try:
            for step in steps:
                waiting.append(thread.submit(made, step))
                if len(waiting) > PREFETCHED_BATCHES:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
