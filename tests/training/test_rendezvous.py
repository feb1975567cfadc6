"""The processes of an attempt meet in a store that earlier attempts have used."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from bertkit.training.rendezvous import store_of_attempt

COUNT = 3


def meeting(store: HashStore, mark: str, first_is_late: bool) -> list[str]:
    """The value under a key that an attempt's first rank sets once all have met, as read by all ranks."""

    def rank(number: int) -> str:
        if number == 0 and first_is_late:
            time.sleep(0.2)
        own = store_of_attempt(store, number, COUNT, timeout_seconds=30)
        if number == 0:
            own.set("mark", mark)
        found: bytes = own.get("mark")
        return found.decode()

    with ThreadPoolExecutor(COUNT) as pool:
        return list(pool.map(rank, range(COUNT)))


def test_every_attempt_has_keys_of_its_own_whichever_rank_comes_first() -> None:
    store = HashStore()
    for number, first_is_late in enumerate([False, True, True, False]):
        assert meeting(store, str(number), first_is_late) == [str(number)] * COUNT


def test_an_attempt_of_fewer_ranks_after_one_that_was_killed_while_it_met() -> None:
    store = HashStore()
    with pytest.raises(RuntimeError, match="other ranks have not joined"):
        store_of_attempt(store, 0, 5, timeout_seconds=0.1)
    with pytest.raises(RuntimeError, match="the first rank has not joined"):
        store_of_attempt(store, 1, 5, timeout_seconds=0.1)
    assert meeting(store, "a", True) == ["a"] * COUNT
