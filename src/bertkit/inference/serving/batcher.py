"""One thread computes for all clients: waiting work of one kind is packed into batches of a bounded number of tokens.

Not from a paper; model servers commonly do this ("dynamic batching"). Packed sequences have no padding, so a batch
takes any lengths, and nothing has to be sorted or held back until others of its length arrive. A request of many
batches lets others in after each batch, so a short request queued after it waits for one batch only.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bertkit.errors import BertkitError

log = logging.getLogger(__name__)

Compute = Callable[[Any, list[Any]], list[Any]]
"""From the kind of work and its items to one result per item, in order."""

_NEW_RATE = 0.2
"""Weight of the newest batch in the average of tokens per second."""


class QueueFullError(Exception):
    """More tokens are waiting than allowed; `retry_seconds` is when there will be room."""

    def __init__(self, retry_seconds: int) -> None:
        super().__init__(f"too many tokens are waiting; try again in {retry_seconds} s")
        self.retry_seconds = retry_seconds


class BatchReport(NamedTuple):
    """A batch that was computed, for the metrics."""

    key: Any
    requests: int
    items: int
    tokens: int
    seconds: float


@dataclass(eq=False)
class QueuedWork:
    """The work of one request.

    Attributes:
        key: its kind; work of one kind is computed together.
        items: the items to compute, with one result each.
        tokens: of each item.
        future: of the results, in the server's event loop.
        results: of the items computed so far.
    """

    key: Hashable
    items: Sequence[Any]
    tokens: Sequence[int]
    future: asyncio.Future[list[Any]]
    arrived: float = field(default_factory=time.monotonic)
    results: list[Any] = field(default_factory=list)

    @property
    def remaining_tokens(self) -> int:
        return sum(self.tokens[len(self.results) :])


class _BatchShare(NamedTuple):
    """A request's share of a batch: its next items."""

    work: QueuedWork
    items: Sequence[Any]
    tokens: int


class Batcher:
    """The queue and the thread that works on it.

    Args:
        compute: called only by this thread.
        batch_tokens: maximum per batch; a longer item is computed by itself.
        wait_seconds: how long the first item of a batch waits for others while the thread is idle.
        queue_tokens: maximum number of waiting tokens.
        observe: called with a report of each batch.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        batch_tokens: int,
        wait_seconds: float,
        queue_tokens: int,
        observe: Callable[[BatchReport], None] = lambda report: None,
    ) -> None:
        self._compute = compute
        self._batch_tokens = batch_tokens
        self._wait_seconds = wait_seconds
        self._queue_tokens = queue_tokens
        self._observe = observe
        self._changed = threading.Condition()
        self._waiting: deque[QueuedWork] = deque()
        self._tokens = 0
        self._stopping = False
        self._tokens_per_second = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    @property
    def waiting_tokens(self) -> int:
        """Number of tokens that are waiting or being computed."""
        return self._tokens

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; results are delivered to the event loop that is running now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after everything in the queue is computed."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def submit(self, key: Hashable, items: Sequence[Any], tokens: Sequence[int]) -> asyncio.Future[list[Any]]:
        """Queue work; called in the event loop. Cancelling the future removes the work from the queue.

        Args:
            key: its kind.
            items: at least one.
            tokens: of each item.

        Raises:
            QueueFullError: the queue currently has no room for it.
        """
        assert self._loop is not None
        count = sum(tokens)
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        with self._changed:
            if self._tokens + count > self._queue_tokens:
                raise QueueFullError(self.retry_seconds())
            self._tokens += count
            self._waiting.append(QueuedWork(key, items, tokens, future))
            self._changed.notify_all()
        return future

    def retry_seconds(self) -> int:
        """Estimated seconds until the waiting work is done, from 1 to 60."""
        return max(1, min(60, round(self._tokens / self._tokens_per_second))) if self._tokens_per_second else 1

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            if batch:
                started = time.monotonic()
                outcomes = self._computed(batch)
                self._finish(batch, outcomes, time.monotonic() - started)

    def _next_batch(self) -> list[_BatchShare] | None:
        """The next batch to compute, possibly empty; None: the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            if not self._waiting:
                return None
            self._wait_for_company()
            return self._cut_batch()

    def _wait_for_company(self) -> None:
        head = self._waiting[0]
        while not self._stopping:
            left = head.arrived + self._wait_seconds - time.monotonic()
            ready = sum(work.remaining_tokens for work in self._waiting if work.key == head.key)
            if left <= 0 or ready >= self._batch_tokens:
                return
            self._changed.wait(left)

    def _cut_batch(self) -> list[_BatchShare]:
        """The next items of all work of the first one's kind, as many as fit."""
        batch, room, key = list[_BatchShare](), self._batch_tokens, self._waiting[0].key
        for work in list(self._waiting):
            if work.future.cancelled():
                self._waiting.remove(work)
                self._tokens -= work.remaining_tokens
                continue
            if work.key != key or room <= 0:
                continue
            first = last = len(work.results)
            tokens = 0
            while last < len(work.items) and (tokens + work.tokens[last] <= room or not (batch or tokens)):
                tokens += work.tokens[last]
                last += 1
            if last > first:
                batch.append(_BatchShare(work, work.items[first:last], tokens))
                room -= tokens
                self._waiting.remove(work)
        return batch

    def _computed(self, batch: list[_BatchShare]) -> list[list[Any] | Exception]:
        """The results of each share; if the batch fails, each share is computed alone, so one cannot spoil others."""
        key = batch[0].work.key
        try:
            found = self._compute(key, [item for share in batch for item in share.items])
        except Exception as error:
            if len(batch) > 1:
                return [self._computed([share])[0] for share in batch]
            if not isinstance(error, BertkitError):
                log.debug("a batch failed", exc_info=True)
            return [error]
        rest = iter(found)
        return [[next(rest) for _ in share.items] for share in batch]

    def _finish(self, batch: list[_BatchShare], outcomes: list[list[Any] | Exception], seconds: float) -> None:
        done: list[tuple[QueuedWork, Exception | None]] = []
        with self._changed:
            for share, outcome in zip(batch, outcomes, strict=True):
                work = share.work
                self._tokens -= share.tokens
                if isinstance(outcome, Exception):
                    self._tokens -= work.remaining_tokens - share.tokens
                    done.append((work, outcome))
                    continue
                work.results += outcome
                if len(work.results) == len(work.items):
                    done.append((work, None))
                else:
                    self._waiting.append(work)
        tokens = sum(share.tokens for share in batch)
        rate = tokens / max(seconds, 1e-6)
        before = self._tokens_per_second or rate
        self._tokens_per_second = (1 - _NEW_RATE) * before + _NEW_RATE * rate
        self._observe(BatchReport(batch[0].work.key, len(batch), sum(len(s.items) for s in batch), tokens, seconds))
        assert self._loop is not None
        # One call for all of them, because each call wakes the event loop.
        self._loop.call_soon_threadsafe(_deliver, done)


def _deliver(done: list[tuple[QueuedWork, Exception | None]]) -> None:
    for work, error in done:
        if work.future.done():
            continue  # its client has gone
        if error is None:
            work.future.set_result(work.results)
        else:
            work.future.set_exception(error)
