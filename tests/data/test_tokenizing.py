"""Blocks tokenised in a pool and in this process: in order, a bounded number ahead, at any relative speed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from bertkit.data import tokenizing
from bertkit.data.shard_writer import TokenBlock
from bertkit.data.tokenizing import BLOCKS_KEPT, MIN_BLOCKS_FOR_POOL, tokenize_blocks
from bertkit.text.corpus import Block, Position
from bertkit.text.source_options import SourceOptions
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer
from tests.text.corpora import english

IN_FLIGHT = 2


class SlowPool:
    """A pool that finishes a block on request, or immediately once it is `fast`."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], list[Any]]] = []
        self.fast = False

    def submit(self, _work: Callable[..., Any], parts: list[Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, parts))
        if self.fast:
            self.finish()
        return future

    def finish(self) -> None:
        future, parts = self.waiting.pop(0)
        future.set_result(("pool", parts))


def blocks(count: int) -> Iterator[Block]:
    return (Block([(1, [str(number)])], Position(0, number)) for number in range(count))


def test_blocks_come_in_order_and_are_done_here_while_the_pool_is_busy() -> None:
    pool = SlowPool()
    own: list[int] = []

    def work(parts: list[Any]) -> Any:
        own.append(int(parts[0][1][0]))
        if len(own) % 3 == 0:
            pool.finish()
        if len(own) == 20:
            pool.fast = True
            while pool.waiting:
                pool.finish()
        return "here", parts

    found = []
    for (who, parts), end, characters in tokenizing._in_order(pool, blocks(40), IN_FLIGHT, work):  # type: ignore[arg-type, misc]
        assert end.parts == int(parts[0][1][0])
        assert characters == len(str(end.parts))
        found.append((end.parts, who))
    assert [number for number, _ in found] == list(range(40))
    assert [number for number, who in found if who == "here"] == own
    assert len(own) == 20


def test_an_error_of_its_own_work_comes_in_its_turn() -> None:
    pool = SlowPool()

    def work(parts: list[Any]) -> Any:
        while pool.waiting:
            pool.finish()
        raise ValueError(parts[0][1][0])

    results = tokenizing._in_order(pool, blocks(9), IN_FLIGHT, work)  # type: ignore[arg-type]
    assert [next(results)[1].parts for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="2"):
        next(results)


def test_the_collector_comes_back_when_the_last_one_ends() -> None:
    before = gc.isenabled(), sys.getswitchinterval()
    first, second = tokenizing._gc_paused(), tokenizing._gc_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert (gc.isenabled(), sys.getswitchinterval()) == before


def test_no_more_are_kept_than_memory_has_room_for() -> None:
    """If the first block is never finished, only it is waited for after a number of others."""
    pool = SlowPool()
    done = 0

    def work(parts: list[Any]) -> Any:
        nonlocal done
        done += 1
        if done == BLOCKS_KEPT * IN_FLIGHT - IN_FLIGHT:
            pool.finish()
        assert done <= BLOCKS_KEPT * IN_FLIGHT - IN_FLIGHT
        return "here", parts

    results = tokenizing._in_order(pool, blocks(1000), IN_FLIGHT, work)  # type: ignore[arg-type]
    assert next(results)[1].parts == 0
    assert done == BLOCKS_KEPT * IN_FLIGHT - IN_FLIGHT


@pytest.mark.parametrize("stop_after", [2, None])
def test_the_interpreter_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, stop_after: int | None) -> None:
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=200), english(100))
    texts = [english(40, seed) for seed in range(MIN_BLOCKS_FOR_POOL + 3)]
    corpus = [Block([(1, lines)], Position(0, number)) for number, lines in enumerate(texts)]
    before = gc.isenabled(), sys.getswitchinterval()
    alone = list(tokenize_blocks(iter(corpus), tokenizer, SourceOptions(), workers=1))
    results = tokenize_blocks(iter(corpus), tokenizer, SourceOptions(), workers=2)
    found: list[tuple[TokenBlock, Position, int]] = []
    for each in results:
        assert not gc.isenabled()
        found.append(each)
        if len(found) == stop_after:
            results.close()
    assert (gc.isenabled(), sys.getswitchinterval()) == before
    for own, other in zip(found, alone, strict=stop_after is None):
        assert own[1:] == other[1:]
        assert np.array_equal(own[0].ids_T, other[0].ids_T)
