"""The processes ("ranks") that train one model together, as seen by each of them; usually there is only one.

Not from a paper. The terms are those of torch.distributed. Every rank runs the same command: the first one writes the
run directory, and decisions that all must share are made there (`from_first`). Code that needs torch is in
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
    """Another rank died, ended or does not answer; --resume continues the run from its newest checkpoint."""


class RanksNeededError(UsageError):
    """The recipe needs several processes, but there is only this one.

    Args:
        count: `engine.ranks`.
    """

    def __init__(self, count: int) -> None:
        super().__init__(
            f"engine.ranks is {count}, but there is only one process; start it with `bertkit ... --nproc {count}` or"
            f" `torchrun --nproc-per-node {count} -m bertkit ...`"
        )
        self.count = count


def leave(code: int) -> NoReturn:
    """End this process with an exit code; a process that trained with others ends immediately.

    Threads of the libraries that connect ranks may still be running when their objects are destroyed at exit. On a busy
    machine this ended a rank by SIGABRT ("terminate called without an active exception") after everything was written.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed by the reader or by the program
                stream.flush()
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


def share_of(number: int, rank: int, count: int) -> tuple[int, int]:
    """Start and end of a rank's part of `number` sequences: consecutive parts with sizes that differ by at most 1."""
    return number * rank // count, number * (rank + 1) // count


class Ranks:
    """A single process, and the interface of every group of ranks.

    Attributes:
        rank: of this process, from 0.
        count: number of ranks.
        wants_stop: whether this rank should stop; sent to the others with the counts of the next update.
        all_stop: whether any rank wants to stop, so that all stop after the same update.
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
        """The rank's name, for messages."""
        return f"rank {self.rank}"

    def share(self, number: int) -> tuple[int, int]:
        """Start and end of this rank's part of `number` sequences, see `share_of`."""
        return share_of(number, self.rank, self.count)

    def from_first(self, make: Callable[[], Value]) -> Value:
        """The result of `make` on the first rank; an error there is raised on every rank."""
        return make()

    def led(
        self, make: Callable[[], Value], brief: Callable[[Value], Brief], follow: Callable[[Brief], Value]
    ) -> Value:
        """The result of `make` on the first rank; on the others, what `follow` makes from a summary of it.

        Args:
            make: called on the first rank.
            brief: extracts from the result what the others need.
            follow: called on the others.
        """
        made: list[Value] = []

        def told() -> Brief:
            made.append(make())
            return brief(made[0])

        found = self.from_first(told)
        return made[0] if made else follow(found)

    def in_turn(self) -> AbstractContextManager[None]:
        """A context that the first rank enters first, then one rank of each machine, then the rest, so that the others
        find in a cache what the first put there. There must be no communication between ranks inside."""
        return nullcontext()

    def gathered(self, value: Value) -> list[Value]:
        """The values of all ranks, in their order."""
        return [value]

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """Each count, summed over the ranks; all ranks give equally many counts."""
        return list(counts)

    def sum_gradients(self, parameters: Sequence[Any]) -> None:
        """Sum each parameter's gradient over the ranks; a parameter without a gradient on all ranks stays without."""

    def seconds(self, now: Callable[[], float]) -> float:
        """The first rank's time."""
        return now()

    def begin(self, *, timeout_seconds: float) -> None:
        """Called when training begins: from here on, a rank that does not answer within the timeout is lost."""

    def require_same(self, of: Mapping[str, Any]) -> None:
        """Check that each of these named values is the same on all ranks.

        Raises:
            UsageError: they differ; the message names what differs, and where.
        """


@dataclass(frozen=True)
class TorchrunEnvironment:
    """The information that torchrun gives a process that it starts.

    Attributes:
        rank, local_rank: of this process among all, and among those on this machine.
        count: number of processes.
        restart: how often torchrun has restarted them.
    """

    rank: int
    local_rank: int
    count: int
    restart: int

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> TorchrunEnvironment | None:
        """From the environment as set by torchrun or a compatible launcher; None if this process is alone.

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
            raise UsageError(f"RANK={rank}, WORLD_SIZE={count}: RANK must be below WORLD_SIZE; start it with torchrun")
        return cls(rank, local_rank, count, restart)


_ALONE = Ranks()
_current = _ALONE


def current() -> Ranks:
    """The current group of ranks; a single process is a group of one."""
    return _current


@contextmanager
def use_ranks(ranks: Ranks) -> Iterator[None]:
    """Make `ranks` the current group while the context is open."""
    global _current
    before, _current = _current, ranks
    try:
        yield
    finally:
        _current = before
