"""A store shared by the processes of one attempt, regardless of what an earlier attempt left in it.

Not from a paper; built on the rendezvous of torchrun (torch.distributed.elastic). Its agent keeps one store over all
restarts, at one address, with every key of earlier processes, including their addresses. The number of restarts does
not distinguish attempts, since a change of machines does not count as one. Therefore the first rank names each attempt
with a random word, and uses it to admit the others:

    meeting/name                the first rank's word for this attempt
    meeting/WORD/asks/RANK      another rank has read the word, and gives one of its own
    meeting/WORD/admitted       the first rank's answer: the words of all ranks that it has seen

A rank that has read the word of an earlier attempt does not find its own word in that answer, and reads again.
"""

from __future__ import annotations

import json
import time
import uuid

from torch.distributed.distributed_c10d import PrefixStore, Store

_POLL_SECONDS = 0.02
_NAME = "meeting/name"


def store_of_attempt(store: Store, rank: int, count: int, *, timeout_seconds: float) -> PrefixStore:
    """The part of a store that only the processes of this attempt use.

    Args:
        store: reached by all processes, and possibly used by earlier ones.
        rank: of this process.
        count: number of processes.
        timeout_seconds: time limit for all of them to join.

    Raises:
        RuntimeError: they have not joined.
    """
    until = time.monotonic() + timeout_seconds
    word = uuid.uuid4().hex
    name = _admit(store, word, count, until) if rank == 0 else _ask(store, rank, word, until)
    return PrefixStore(f"attempt/{name}", store)


def _admit(store: Store, name: str, count: int, until: float) -> str:
    """As the first rank: wait for all others, then admit them."""
    store.set(_NAME, name)
    asking = [f"meeting/{name}/asks/{rank}" for rank in range(1, count)]
    while not store.check(asking):
        _pause(until, "other ranks have not joined")
    store.set(f"meeting/{name}/admitted", json.dumps([store.get(key).decode() for key in asking]))
    return name


def _ask(store: Store, rank: int, word: str, until: float) -> str:
    """As another rank: register under every name that appears, until the answer contains this rank's own word."""
    asked = ""
    while True:
        if store.check([_NAME]):
            name = store.get(_NAME).decode()
            if name != asked:
                store.set(f"meeting/{name}/asks/{rank}", word)
                asked = name
            answer = f"meeting/{name}/admitted"
            if store.check([answer]) and word in json.loads(store.get(answer)):
                return name
        _pause(until, "the first rank has not joined")


def _pause(until: float, missing: str) -> None:
    if time.monotonic() > until:
        raise RuntimeError(missing)
    time.sleep(_POLL_SECONDS)
