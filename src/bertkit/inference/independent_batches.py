"""Batches in which the bits of a sequence's output depend on no other sequence.

Own design; sentence-transformers, which pads to the longest text of a batch, gives a text other last bits in other
company (its issues 2312, 3197 and 3278). Three things let company show, each seen on torch 2.13 with MKL and oneDNN:

- Attention sums over the padded length: over 16 cells in another order than over 24; and a product of one matrix is
  laid out differently from a stack of several. Here a sequence's rectangle has its own length, rounded up, and is never
  alone (`PackedSequences.from_lengths`).
- A matrix product of few rows (up to 3 a thread) takes another kernel, and the last elements of a chunk, those beyond
  the width of a vector register, take another formula of an activation (GELU by tanh, SiLU). Here the tokens of a
  batch are filled up to a multiple of `TOKEN_STEP`, its sequences to one of `SEQUENCE_STEP`.
- torch cuts an operation into chunks by the number of threads. Here a batch is computed by one thread, and as many
  batches at once as torch has threads, which is also a little faster.

On a processor with tiles (AMX), products in bfloat16 part long sums by their height, so that a fixed number of rows is
multiplied at once there (`models/bf16.py`).

That rows of one matrix product do not depend on where they stand in it is a property of these libraries that tests
check; no library promises it. On CUDA nothing is promised: kernels are chosen by the size of the product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import torch

from bertkit.data.batch import PackedBatch

TOKEN_STEP = 64
SEQUENCE_STEP = 16
SMALLEST_BATCH = 256
"""Tokens below which a batch is not parted for the sake of more threads."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def independent_batch(
    ids: Sequence[Sequence[int]], token_types: Sequence[Sequence[int]], *, max_tokens: int
) -> PackedBatch:
    """A packed batch of these sequences, and behind them sequences that only fill it up.

    Args:
        ids, token_types: of each sequence.
        max_tokens: the longest sequence that the model reads.
    """
    fillers = filler_lengths(sum(map(len, ids)), len(ids), max_tokens=max_tokens)
    token = ids[0][0]
    return PackedBatch.from_ids(
        [*ids, *([token] * length for length in fillers)],
        [*token_types, *([0] * length for length in fillers)],
        independent=True,
    )


def filler_lengths(tokens: int, sequences: int, *, max_tokens: int) -> list[int]:
    """Lengths of the sequences that fill a batch up; none where it is full already."""
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


def batches_by_length(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """The numbers of the sequences, the longest first, in batches of at most this many tokens."""
    batches: list[list[int]] = []
    tokens = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if not batches or tokens + lengths[number] > most_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(number)
        tokens += lengths[number]
    return batches


def even_batch_tokens(lengths: Sequence[int], most_tokens: int, workers: int) -> int:
    """At how many tokens of a batch `batches_by_length` makes as many batches for each worker; at most `most_tokens`
    where no sequence is longer than half of that."""
    total, longest = sum(lengths), max(lengths, default=0)
    # A batch may end a sequence short of full.
    rounds = -(-total // (workers * max(1, most_tokens - longest))) or 1
    return -(-total // (rounds * workers)) + longest


class _Workers:
    """Threads of which each computes with one thread of torch; made at first use, as many as torch has threads."""

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
                # The call above also sets what torch tells threads that are yet to come.
                torch.set_num_threads(self.count)
            return self._pool


_workers = _Workers()


def worker_count() -> int:
    """How many batches are computed at once."""
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
