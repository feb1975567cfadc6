"""Several processes that train one model: torch.distributed, with one sum of all gradients per update.

Not from a paper; data parallelism as in Li et al. 2020, PyTorch Distributed, arXiv:2006.15704. DistributedDataParallel
is not used: its hooks expect one forward pass of one module and one backward pass per update, and divide by the number
of ranks. Here a loss can take several passes (companions, FreeLB, micro-batches), gradients of word embeddings can be
sparse, the set of trained parameters changes during the run, and each term is divided by its count over all ranks.
Gradients are therefore summed once, in one flat tensor per type, after the last micro-batch.

Small numbers are exchanged between processors (gloo), gradients where they are (gloo or nccl). Work of unknown
duration, such as tokenising a corpus on the first rank, is awaited at the rendezvous store, without a time limit.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from bertkit.errors import BertkitError, UsageError, first_line
from bertkit.ranks import RankLostError, Ranks, TorchrunEnvironment
from bertkit.training.rendezvous import store_of_attempt

log = logging.getLogger(__name__)

Value = TypeVar("Value")

JOIN_SECONDS = 1800.0
"""Time limit for all ranks to join."""
_POLL_SECONDS = 0.02
_DEAD = ("zombie", "dead", "stopped")
"""States in which a process does not compute, by psutil's names."""
_GLOO = "/gloo/"
"""Part of every gloo error message: the path of the file that raised it."""
_REMEDY = "continue from the newest checkpoint with --resume"
_ANSWER_SECONDS = 5.0
"""Time within which a live rank notices that another one is lost."""


@dataclass(frozen=True)
class Member:
    """A process of the group."""

    rank: int
    local_rank: int
    host: str
    pid: int

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    def is_dead(self) -> bool | None:
        """Whether it has died, or was halted; None if this is not visible from here."""
        if self.host != socket.gethostname():
            return None
        import psutil

        try:
            return psutil.Process(self.pid).status() in _DEAD
        except psutil.NoSuchProcess:
            return True


@contextmanager
def joined(launch: TorchrunEnvironment) -> Iterator[RankGroup]:
    """The group of ranks that torchrun has started, while the context is open.

    Raises:
        RankLostError: the others do not join.
    """
    backend = "gloo"
    if torch.cuda.is_available() and launch.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(launch.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=JOIN_SECONDS)
    try:
        shared, rank, count = next(rendezvous("env://", timeout=timeout))
        store = store_of_attempt(shared, rank, count, timeout_seconds=JOIN_SECONDS)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RankLostError(f"the {launch.count} ranks did not all connect: {first_line(error)}") from error
    try:
        ranks = RankGroup(launch, store)
        yield ranks
        ranks.gathered(None)  # the first rank may host the store, so it ends with the others
    finally:
        # Without the others there is no orderly shutdown; the system closes what is open.
        with suppress(RuntimeError):
            dist.destroy_process_group()


class RankGroup(Ranks):
    """The ranks of a process group created by torch.distributed.

    Args:
        launch: this process's place in the group, from torchrun.
        store: shared by these processes.
    """

    def __init__(self, launch: TorchrunEnvironment, store: Store) -> None:
        self.rank, self.count = launch.rank, launch.count
        self._store = PrefixStore("bertkit", store)
        self._group: dist.ProcessGroup | None = None
        self._told = 0
        self._in_turn = False
        self._flats: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        own = Member(launch.rank, launch.local_rank, socket.gethostname(), os.getpid())
        self._members = [own] * self.count
        self._members = self.gathered(own)

    @property
    def name(self) -> str:
        return self._members[self.rank].name

    def begin(self, *, timeout_seconds: float) -> None:
        with self._watched():
            self._group = dist.new_group(timeout=timedelta(seconds=timeout_seconds))

    def from_first(self, make: Callable[[], Value]) -> Value:
        self._told += 1
        key = f"told/{self._told}"
        if self.is_first:
            try:
                made = make()
            except BaseException as error:
                with suppress(RuntimeError):
                    self._set(key, (False, error if isinstance(error, BertkitError) else None))
                raise
            with self._watched():
                self._set(key, (True, made))
            return made
        self._wait(lambda: self._store.check([key]))
        with self._watched():
            is_made, found = pickle.loads(self._store.get(key))
        if is_made:
            value: Value = found
            return value
        raise found if found is not None else self._lost([self._members[0]])

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        self._told += 1
        turns = [0 if each.rank == 0 else 1 if each.local_rank == 0 else 2 for each in self._members]
        own = turns[self.rank]
        assert not self._in_turn, "turns are not taken within a turn"
        for turn in range(own):
            self._wait(partial(self._is_over, turn, turns.count(turn)))
        self._in_turn = True
        try:
            yield
        finally:
            self._in_turn = False
            with suppress(RuntimeError):
                self._store.add(self._turn(own), 1)

    def _is_over(self, turn: int, members: int) -> bool:
        return self._store.add(self._turn(turn), 0) >= members

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # bytes, which torch declares as str

    def _turn(self, number: int) -> str:
        return f"turn/{self._told}/{number}"

    def gathered(self, value: Value) -> list[Value]:
        assert not self._in_turn, "the others wait for their turn"
        found: list[Any] = [None] * self.count
        with self._watched():
            dist.all_gather_object(found, value, group=self._group)
        return found

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        numbers = torch.tensor([*counts, int(self.wants_stop)], dtype=torch.int64)
        with self._watched():
            dist.all_reduce(numbers, group=self._group)
        *summed, stopping = numbers.tolist()
        self.all_stop = stopping > 0
        return summed

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for kind, own in kinds.items():
            self._sum_flat(kind, own)

    def _sum_flat(self, kind: tuple[torch.dtype, torch.device], parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients of one type and device in one tensor, followed by how many ranks have each of them."""
        total = sum(parameter.numel() for parameter in parameters)
        flat = self._flats.get(kind)
        if flat is None or flat.numel() != total + len(parameters):
            flat = self._flats[kind] = torch.empty(total + len(parameters), dtype=kind[0], device=kind[1])
        parts = torch.split(flat[:total], [parameter.numel() for parameter in parameters])
        for part, parameter in zip(parts, parameters, strict=True):
            gradient = parameter.grad
            if gradient is None:
                part.zero_()
            else:
                part.copy_((gradient.to_dense() if gradient.is_sparse else gradient).flatten())
        has = [parameter.grad is not None for parameter in parameters]
        flat[total:] = torch.tensor(has, dtype=kind[0], device=kind[1])
        with self._watched():
            dist.all_reduce(flat, group=self._group)
        # The gradients are views of the flat tensor, which is refilled only after they were dropped.
        for part, parameter, number in zip(parts, parameters, flat[total:].tolist(), strict=True):
            parameter.grad = part.view_as(parameter) if number else None

    def mesh(self, device_type: str) -> DeviceMesh:
        """The ranks as a one-dimensional mesh, for tensors sharded over them."""
        assert self._group is not None, "the training has not begun"
        return DeviceMesh.from_group(self._group, device_type)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """For computations that exchange numbers: a connection error means that another rank is lost."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or _GLOO in str(error)):
                raise
            with self._watched():
                raise

    def seconds(self, now: Callable[[], float]) -> float:
        time_1 = torch.tensor([now()], dtype=torch.float64)
        with self._watched():
            dist.broadcast(time_1, src=0, group=self._group)
        return float(time_1)

    def require_same(self, of: Mapping[str, Any]) -> None:
        found = self.gathered(dict(of))
        for rank, other in enumerate(found[1:], start=1):
            differing = [name for name in {**found[0], **other} if found[0].get(name) != other.get(name)]
            if differing:
                lines = "; ".join(f"{name}: {found[0].get(name)}, there {other.get(name)}" for name in differing)
                raise UsageError(
                    f"{self._members[rank].name} does not train the same as {self._members[0].name}: {lines}; give all"
                    " ranks the same recipe, data and version of bertkit"
                )

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait without a time limit: the launcher ends all ranks if one of them dies."""
        with self._watched():
            while not is_done():
                time.sleep(_POLL_SECONDS)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """A context in which every failure is attributed to another rank."""
        try:
            yield
        except RuntimeError as error:  # torch's error for a closed connection or a timeout
            log.debug("%s: %s", self.name, error)
            raise self._lost(self._missing()) from error

    def _lost(self, missing: Sequence[Member]) -> RankLostError:
        if not missing:
            return RankLostError("the connection to the other ranks was lost", _REMEDY)
        dead = [each for each in missing if each.is_dead()]
        names = ", ".join(each.name for each in dead or missing)
        return RankLostError(f"{names} {'died or was halted' if dead else 'does not answer'}", _REMEDY)

    def _missing(self) -> list[Member]:
        """The members that, unlike this one, have not noticed that something is wrong."""
        until = time.monotonic() + _ANSWER_SECONDS
        missing = [each for each in self._members if each.rank != self.rank]
        try:
            self._set(f"here/{self.rank}", True)
            while missing and time.monotonic() < until and not any(each.is_dead() for each in missing):
                time.sleep(_POLL_SECONDS)
                missing = [each for each in missing if not self._store.check([f"here/{each.rank}"])]
        except RuntimeError:
            return [self._members[0]]  # the store is on the first rank
        return missing
