"""Batches in which the bits of a sequence's output do not depend on the other sequences.

Not from a paper. sentence-transformers pads to the longest text of a batch, which changes the last bits of a vector
with the other texts of the batch (its issues 2312, 3197 and 3278). There are three causes, each seen on torch 2.13 with
MKL and oneDNN:

- Attention sums over the padded length: over 16 cells in a different order from 24. A product of one matrix is also
  laid out differently from a stack of several. Here the rectangle of a sequence has the sequence's own length, rounded
  up, and is never alone (`PackedSequences.from_lengths`).
- A matrix product of few rows (up to 3 per thread) uses another kernel. The last elements of a chunk, those beyond the
  width of a vector register, use another formula for an activation (GELU by tanh, SiLU). Here the tokens of a batch are
  filled up to a multiple of `TOKEN_STEP`, its sequences to a multiple of `SEQUENCE_STEP`.
- torch cuts an operation into chunks by the number of threads. Here each batch is computed by one thread, with as many
  batches at once as torch has threads, which is also slightly faster.

On a processor with tiles (AMX), products in bfloat16 split long sums by their height, so a fixed number of rows is
multiplied at once there (`models/quantisation/bf16.py`).

That rows of a matrix product do not depend on their position is a property of these libraries that tests check; no
library guarantees it. On CUDA nothing is guaranteed: kernels are chosen by the size of the product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import torch

from bertkit.data.batch import PackedBatch
from bertkit.training.engine import Engine

TOKEN_STEP = 64
SEQUENCE_STEP = 16
_SMALLEST_BATCH = 256
"""Batches with fewer tokens are not split to use more threads."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def independent_batch(
    ids: Sequence[Sequence[int]],
    token_types: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    keys: Sequence[int] | None = None,
) -> PackedBatch:
    """A packed batch of these sequences, followed by filler sequences.

    Args:
        ids, token_types: of each sequence.
        max_tokens: the longest sequence the model reads.
        keys: how many of its first tokens the tokens of each sequence attend to; None: they attend to all.
    """
    fillers = filler_lengths(sum(map(len, ids)), len(ids), max_tokens=max_tokens)
    token = ids[0][0]
    return PackedBatch.from_ids(
        [*ids, *([token] * length for length in fillers)],
        [*token_types, *([0] * length for length in fillers)],
        independent=True,
        keys=None if keys is None else [*keys, *fillers],
    )


def filler_lengths(tokens: int, sequences: int, *, max_tokens: int) -> list[int]:
    """Lengths of the sequences that fill up a batch; none if it is already full."""
    count = -sequences % SEQUENCE_STEP
    missing = -tokens % TOKEN_STEP
    if not count and missing:
        count = SEQUENCE_STEP
    while True:
        total = missing + max(0, -(-(count - missing) // TOKEN_STEP)) * TOKEN_STEP
        if total <= count * max_tokens:
            break
        count += SEQUENCE_STEP
    if not count:
        return []
    each, longer = divmod(total, count)
    return [each + 1] * longer + [each] * (count - longer)


def tokens_per_batch(lengths: Sequence[int], engine: Engine) -> int:
    """Tokens per batch; on a CPU such that all threads get the same number of batches, at least one."""
    most = engine.micro_batch_tokens
    if engine.device.type != "cpu":
        return most
    return min(most, max(_SMALLEST_BATCH, even_batch_tokens(lengths, most, worker_count())))


def even_batch_tokens(lengths: Sequence[int], most_tokens: int, workers: int) -> int:
    """Tokens per batch at which `batches_by_length` makes equally many batches for each worker; at most `most_tokens`
    if no sequence is longer than half of that."""
    total, longest = sum(lengths), max(lengths, default=0)
    # A batch may be one sequence short of full.
    rounds = -(-total // (workers * max(1, most_tokens - longest))) or 1
    return -(-total // (rounds * workers)) + longest


class _Workers:
    """Worker threads, each computing with one torch thread; created at first use, as many as torch has threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self.count = 0

    def pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self.count = torch.get_num_threads()
                all_there = threading.Barrier(self.count + 1)

                def begin() -> None:
                    torch.get_num_threads()  # which sets this thread's number to the process's, once
                    torch.set_num_threads(1)
                    all_there.wait()

                self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="bertkit-batch", initializer=begin)
                for _ in range(self.count):
                    self._pool.submit(lambda: None)
                all_there.wait()
                # The call above also sets the number that torch passes to future threads.
                torch.set_num_threads(self.count)
            return self._pool


_workers = _Workers()


def worker_count() -> int:
    """Number of batches computed at once."""
    _workers.pool()
    return _workers.count


def each_on_one_thread(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The function's results in the order of the items; a few are computed ahead, as many at once as there are threads.

    May be called from several threads, which then share the workers.
    """
    pool = _workers.pool()
    waiting = iter(items)
    ahead = [pool.submit(function, item) for item in islice(waiting, 2 * _workers.count)]
    try:
        while ahead:
            done = ahead.pop(0)
            found = done.result()
            ahead += [pool.submit(function, item) for item in islice(waiting, 1)]
            yield found
    finally:
        for future in ahead:
            future.cancel()
