"""The server's queue: waiting requests are packed, long ones yield, one error affects no other request, nothing is
lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bertkit.errors import DataError
from bertkit.inference.serving.batcher import Batcher, BatchReport, QueueFullError


class Recorder:
    """Doubles numbers; negative ones raise an error. The first batch waits for `go`."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, list[int]]] = []
        self.reports: list[BatchReport] = []
        self.go = threading.Event()

    def __call__(self, key: Any, items: list[int]) -> list[int]:
        self.batches.append((key, items))
        assert self.go.wait(20)
        if any(item < 0 for item in items):
            raise DataError("below zero")
        return [2 * item for item in items]


def run(test: Callable[[Batcher, Recorder], Coroutine[Any, Any, None]], **settings: Any) -> None:
    recorder = Recorder()

    async def inside() -> None:
        batcher = Batcher(
            recorder,
            observe=recorder.reports.append,
            **{"batch_tokens": 10, "wait_seconds": 0.0, "queue_tokens": 1000, **settings},
        )
        batcher.start()
        try:
            await asyncio.wait_for(test(batcher, recorder), 20)
        finally:
            recorder.go.set()
            await asyncio.to_thread(batcher.stop)

    asyncio.run(inside())


async def begun(recorder: Recorder, batches: int = 1) -> None:
    """Wait until the thread computes its batch of this number."""
    while len(recorder.batches) < batches:
        await asyncio.sleep(0.001)


def test_what_waits_is_computed_together_and_each_gets_its_own() -> None:
    async def test(batcher: Batcher, recorder: Recorder) -> None:
        first = batcher.submit("a", [0], [1])
        await begun(recorder)
        others = [batcher.submit("a", [n, n + 10], [2, 1]) for n in range(1, 4)]
        recorder.go.set()
        assert await first == [0]
        assert [await each for each in others] == [[2, 22], [4, 24], [6, 26]]
        assert [items for _, items in recorder.batches] == [[0], [1, 11, 2, 12, 3, 13]]
        assert [(each.requests, each.items, each.tokens) for each in recorder.reports] == [(1, 1, 1), (3, 6, 9)]
        assert batcher.waiting_tokens == 0

    run(test)


def test_a_batch_is_of_one_kind_and_within_its_tokens() -> None:
    async def test(batcher: Batcher, recorder: Recorder) -> None:
        first = batcher.submit("a", [0], [1])
        await begun(recorder)
        found = [batcher.submit("ab"[n % 2], [n], [4]) for n in range(6)] + [batcher.submit("a", [9], [25])]
        recorder.go.set()
        await asyncio.gather(first, *found)
        batches = [(key, items) for key, items in recorder.batches[1:]]
        assert batches == [("a", [0, 2]), ("b", [1, 3]), ("a", [4]), ("b", [5]), ("a", [9])]

    run(test)


def test_long_work_gives_way_to_a_short_request() -> None:
    async def test(batcher: Batcher, recorder: Recorder) -> None:
        long = batcher.submit("a", list(range(10)), [5] * 10)
        await begun(recorder)
        short = batcher.submit("a", [50], [5])
        recorder.go.set()
        assert await short == [100]
        assert await long == [2 * n for n in range(10)]
        assert [50 in items for _, items in recorder.batches].index(True) == 1

    run(test)


def test_one_fault_spoils_no_other_request() -> None:
    async def test(batcher: Batcher, recorder: Recorder) -> None:
        first = batcher.submit("a", [0], [1])
        await begun(recorder)
        good, bad, better = (batcher.submit("a", [n], [1]) for n in (1, -1, 2))
        recorder.go.set()
        assert [await first, await good, await better] == [[0], [2], [4]]
        with pytest.raises(DataError, match="below zero"):
            await bad
        assert batcher.waiting_tokens == 0

    run(test)


def test_the_rest_of_long_work_is_not_computed_after_a_fault() -> None:
    async def test(batcher: Batcher, recorder: Recorder) -> None:
        recorder.go.set()
        with pytest.raises(DataError):
            await batcher.submit("a", [-1, 1, 2, 3], [9, 9, 9, 9])
        assert await batcher.submit("a", [4], [1]) == [8]
        assert batcher.waiting_tokens == 0
        assert [items for _, items in recorder.batches] == [[-1], [4]]

    run(test)


def test_work_whose_client_has_gone_is_not_computed() -> None:
    async def test(batcher: Batcher, recorder: Recorder) -> None:
        first = batcher.submit("a", [0], [1])
        await begun(recorder)
        gone, stays = batcher.submit("a", [1], [1]), batcher.submit("a", [2], [1])
        gone.cancel()
        recorder.go.set()
        assert [await first, await stays] == [[0], [4]]
        assert [items for _, items in recorder.batches] == [[0], [2]]
        assert batcher.waiting_tokens == 0

    run(test)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def test(batcher: Batcher, recorder: Recorder) -> None:
        work = [batcher.submit("a", [n], [4]) for n in range(3)]
        with pytest.raises(QueueFullError) as full:
            batcher.submit("a", [9], [4])
        assert 1 <= full.value.retry_seconds <= 60
        recorder.go.set()
        await asyncio.gather(*work)
        assert await batcher.submit("a", [9], [4]) == [18]

    run(test, queue_tokens=12)


def test_the_first_of_a_batch_waits_for_company_unless_the_batch_is_full() -> None:
    async def test(batcher: Batcher, recorder: Recorder) -> None:
        recorder.go.set()
        first = batcher.submit("a", [1], [1])
        await asyncio.sleep(0.01)
        second = batcher.submit("a", [2], [9])
        assert [await first, await second] == [[2], [4]]
        assert [items for _, items in recorder.batches] == [[1, 2]]

    run(test, wait_seconds=15.0)


def test_stopping_computes_what_waits() -> None:
    recorder = Recorder()
    recorder.go.set()

    async def inside() -> list[Any]:
        batcher = Batcher(recorder, batch_tokens=3, wait_seconds=30.0, queue_tokens=100)
        batcher.start()
        work = [batcher.submit(n % 2, [n], [1]) for n in range(7)]
        await asyncio.to_thread(batcher.stop)
        return await asyncio.wait_for(asyncio.gather(*work), 5)

    assert asyncio.run(inside()) == [[2 * n] for n in range(7)]
