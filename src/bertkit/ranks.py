"""The processes ("ranks") that train one model together, as each of them sees them; usually there is one alone.

Own design. The words are those of torch.distributed. Every rank runs the same command: the first one writes the run
directory, and a decision that others must share is made there (`from_first`). What needs torch is in
training/rank_group.py, which derives from `Ranks`; this file imports nothing heavy.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from bertkit.errors import StoppedError, UsageError

Value = TypeVar("Value")
Brief = TypeVar("Brief")


class RankLostError(StoppedError):
    """Another rank died, ended or does not answer; the run goes on from its newest checkpoint with --resume."""


class RanksNeededError(UsageError):
    """The recipe is to be trained by several processes, and this one is alone.

    Args:
        count: `engine.ranks`.
    """

    def __init__(self, count: int) -> None:
        super().__init__(
            f"engine.ranks is {count}, and this process is alone; start it by `bertkit ... --nproc {count}` or by"
            f" `torchrun --nproc-per-node {count} -m bertkit ...`"
        )
        self.count = count


def leave(code: int) -> NoReturn:
    """End this process with an exit code; one that trained with others ends at once.

    Threads of the libraries that connect ranks may still be running when their objects are destroyed at exit. On a busy
    machine that ended a rank by SIGABRT ("terminate called without an active exception") after all was written.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed by the reader, or by the program
                stream.flush()
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


def share_of(number: int, rank: int, count: int) -> tuple[int, int]:
    """Begin and end of a rank's part of so many sequences: consecutive parts whose sizes differ by at most 1."""
    return number * rank // count, number * (rank + 1) // count


class Ranks:
    """One process alone, which is also the form that every group of ranks has.

    Attributes:
        rank: of this process, from 0.
        count: of all.
        wants_stop: whether this rank is to stop; told to the others with the counts of the next update.
        all_stop: whether any rank wanted to, so that all stop after the same update.
    """

    rank = 0
    count = 1
    wants_stop = False
    all_stop = False

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank}"

    def share(self, number: int) -> tuple[int, int]:
        """Begin and end of this rank's part of so many sequences: `share_of`."""
        return share_of(number, self.rank, self.count)

    def from_first(self, make: Callable[[], Value]) -> Value:
        """What the first rank makes; an error that it makes is raised on every rank."""
        return make()

    def led(
        self, make: Callable[[], Value], brief: Callable[[Value], Brief], follow: Callable[[Brief], Value]
    ) -> Value:
        """What the first rank makes, and what the others make of what they are told about it.

        Args:
            make: on the first rank.
            brief: of what was made, what the others need to know.
            follow: on the others.
        """
        made: list[Value] = []

        def told() -> Brief:
            made.append(make())
            return brief(made[0])

        found = self.from_first(told)
        return made[0] if made else follow(found)

    def in_turn(self) -> AbstractContextManager[None]:
        """A context that the first rank enters first, then one rank of each machine, then the rest: what the first
        puts into a cache is found there by the others. Nothing is told to other ranks inside."""
        return nullcontext()

    def gathered(self, value: Value) -> list[Value]:
        """The values of all ranks, in their order."""
        return [value]

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """Each count, summed over the ranks; as many on each of them."""
        return list(counts)

    def sum_gradients(self, parameters: Sequence[Any]) -> None:
        """Sum each parameter's gradient over the ranks; one that has none on any rank stays without."""

    def seconds(self, now: Callable[[], float]) -> float:
        """The first rank's time."""
        return now()

    def begin(self, *, timeout_seconds: float) -> None:
        """The training begins: from here on a rank that does not answer for so long is lost."""

    def require_same(self, of: Mapping[str, Any]) -> None:
        """Check that all ranks have the same of each of these, in words that name it.

        Raises:
            UsageError: they have not; the message names what differs, and where.
        """


@dataclass(frozen=True)
class Launch:
    """What torchrun tells a process that it starts.

    Attributes:
        rank, local_rank: of this process among all, and among those of this machine.
        count: of all processes.
        restart: how often torchrun has started them anew.
    """

    rank: int
    local_rank: int
    count: int
    restart: int

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """As torchrun, or what acts like it, has set the environment; None where this process is alone.

        Raises:
            UsageError: the variables contradict one another.
        """
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            return None
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        values = [environment.get(name, "0") for name in names]
        if not all(value.isdecimal() for value in values):
            wrong = next(f"{name}={value}" for name, value in zip(names, values, strict=True) if not value.isdecimal())
            raise UsageError(f"{wrong}: expected a whole number, as torchrun sets it")
        rank, local_rank, count, restart = map(int, values)
        if count < 2:
            return None
        if rank >= count:
            raise UsageError(f"RANK={rank}, WORLD_SIZE={count}: a rank is below their number; start it by torchrun")
        return cls(rank, local_rank, count, restart)


_ALONE = Ranks()
_current = _ALONE


def current() -> Ranks:
    """The ranks that train now; a process alone is one."""
    return _current


@contextmanager
def acting(ranks: Ranks) -> Iterator[None]:
    """Be one of these while the context is open."""
    global _current
    before, _current = _current, ranks
    try:
        yield
    finally:
        _current = before
