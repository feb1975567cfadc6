"""A store that the processes of one attempt share, whatever an earlier attempt has left in it.

Own design, on the rendezvous of torchrun (torch.distributed.elastic). Its agent keeps one store over all restarts, at
one address, with every key of the processes that are gone: the addresses at which they were to be reached among them.
The number of restarts does not tell attempts apart either, since a change of machines does not count as one. So the
first rank names each attempt by a random word, and the others are admitted by it:

    meeting/name                the first rank's word for this attempt
    meeting/WORD/asks/RANK      another rank has read the word, and gives one of its own
    meeting/WORD/admitted       the first rank's answer: the words of all that it has seen

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
        store: which all processes reach, and earlier ones may have used.
        rank: of this process.
        count: of all processes.
        timeout_seconds: for all of them to come.

    Raises:
        RuntimeError: they have not come.
    """
    until = time.monotonic() + timeout_seconds
    word = uuid.uuid4().hex
    name = _admit(store, word, count, until) if rank == 0 else _ask(store, rank, word, until)
    return PrefixStore(f"attempt/{name}", store)


def _admit(store: Store, name: str, count: int, until: float) -> str:
    """As the first rank: wait for all others, then answer them."""
    store.set(_NAME, name)
    asking = [f"meeting/{name}/asks/{rank}" for rank in range(1, count)]
    while not store.check(asking):
        _pause(until, "other ranks have not come")
    store.set(f"meeting/{name}/admitted", json.dumps([store.get(key).decode() for key in asking]))
    return name


def _ask(store: Store, rank: int, word: str, until: float) -> str:
    """As another rank: ask under every name that is given, until the answer has the own word."""
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
        _pause(until, "the first rank has not come")


def _pause(until: float, missing: str) -> None:
    if time.monotonic() > until:
        raise RuntimeError(missing)
    time.sleep(_POLL_SECONDS)
