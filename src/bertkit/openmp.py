"""How many OpenMP threads there are if a CPU quota limits them, and how they wait where other processes compute.

Not from a paper. The quota of a container (a Linux control group) limits CPU time per period, not the cores that are
visible: with a thread for each of these, all threads would stand still for most of a period. A waiting thread spins on
its core for a while before it sleeps, since waking takes longer than most waits. GNU's library, which torch uses on
Linux, spins for milliseconds: if another process has taken the core of one thread, the others keep theirs busy,
although that thread could continue there. With two threads, 400 rounds of spinning cost 2 to 3% of the speed on a quiet
machine and keep 54 to 59% of it next to a process that computes, where the library's own bound of 300,000 keeps 34%.
Threads that sleep at once lose 6 to 10% on a quiet machine, so they are used only if other processes are computing when
a command starts (benchmarks/shared_cores.py measures all three).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath

log = logging.getLogger(__name__)

LOAD = Path("/proc/loadavg")
ROOT = Path("/")
"""Where `proc` and `sys` are."""
_MOST_BYTES = 1 << 16
"""Read of a file that the kernel writes; these have a few lines."""
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_SAMPLES = 5
_PAUSE_SECONDS = 0.002
_SPIN_ROUNDS = 400
_MOST_BOUNDED_THREADS = 4
"""More threads wait for one another more often, and each takes its time to wake: there the cost was not measured."""
_own_count: str | None = None
"""The number of threads that `limit_threads` has set."""


def usable_cores() -> int:
    """Number of cores that this process may use: those that it may run on, or its CPU quota, rounded up, if smaller."""
    quota = cpu_quota()
    return _cores() if quota is None else min(_cores(), max(1, math.ceil(quota)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota() -> float | None:
    """How many cores' time the control groups of this process may use (Linux; version 1 or 2); None: unlimited.

    A group is also limited by those that contain it. In a container, a group's path may be that on the host, which does
    not exist here; the container's own group is then at the top.
    """
    quotas = [quota for directory in _control_groups("cpu") for quota in (_quota(directory),) if quota is not None]
    return min(quotas, default=None)


def memory_limit() -> int | None:
    """How many bytes of memory the control groups of this process may use, as in a container; None: unlimited."""
    texts = [
        _contents(directory / name).strip()
        for directory in _control_groups("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    # Version 1 writes a number near 2^63 for no limit, version 2 "max".
    return min((int(text) for text in texts if text.isdecimal() and int(text) < 2**62), default=None)


def _control_groups(controller: str) -> Iterator[Path]:
    """The directories of this process's groups, and those of the groups that contain them."""
    mounts = ROOT / "sys/fs/cgroup"
    for line in _contents(ROOT / "proc/self/cgroup").splitlines():
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        group = PurePosixPath(path.lstrip("/"))
        if ".." in group.parts:  # outside of what this process can see
            group = PurePosixPath()
        for mount in (mounts / controllers, mounts / controller) if controllers else (mounts, mounts / "unified"):
            yield from (mount / each for each in (group, *group.parents))


def _quota(directory: Path) -> float | None:
    """The quota of one group in cores; None if it has none."""
    words = _contents(directory / "cpu.max").split() or [
        *_contents(directory / "cpu.cfs_quota_us").split(),
        *_contents(directory / "cpu.cfs_period_us").split(),
    ]
    try:
        quota, period = map(int, words)
    except ValueError:  # also "max"
        return None
    return quota / period if quota > 0 and period > 0 else None


def _contents(path: Path) -> str:
    """The text of a small file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def threads_are_given() -> bool:
    """Whether the caller has set OMP_NUM_THREADS."""
    return os.environ.get("OMP_NUM_THREADS") not in (None, _own_count)


def given_threads() -> int | None:
    """The caller's OMP_NUM_THREADS; None if it is not set, or a value that the libraries ignore, such as 0."""
    given = os.environ["OMP_NUM_THREADS"] if threads_are_given() else ""
    return int(given) if given.isdecimal() and int(given) > 0 else None


def limit_threads() -> None:
    """Start no more threads than the CPU quota allows, unless OMP_NUM_THREADS is set. Has an effect only before torch
    and numpy are imported, whose libraries start a thread per core."""
    global _own_count
    cores = _cores()
    if _contents(ROOT / "sys/devices/system/cpu/smt/active").strip() == "1":
        cores //= 2  # torch starts a thread per physical core
    if not threads_are_given() and usable_cores() < cores:
        _own_count = os.environ["OMP_NUM_THREADS"] = str(usable_cores())


@cache
def warn_of_more_threads(threads: int) -> None:
    """Say once that a library's caller has more threads than the CPU quota allows, unless OMP_NUM_THREADS is set.

    The threads belong to the caller's whole process, so a library does not change their number.
    """
    if cpu_quota() is None or threads <= usable_cores() or threads_are_given():
        return
    log.warning(
        "torch has %d threads, but the CPU quota of this container allows %d; with more, all are stopped most of the"
        " time. Set OMP_NUM_THREADS=%d before Python starts, or call torch.set_num_threads(%d)",
        *(threads, usable_cores(), usable_cores(), usable_cores()),
    )


def limit_spinning(running: Callable[[], int] | None = None) -> None:
    """Let waiting threads sleep if there are fewer cores than threads and currently computing processes, and let a few
    threads spin briefly otherwise, unless the environment decides how they wait. Has an effect only before torch is
    imported.

    Args:
        running: returns how many other threads of the machine compute now; None: read from `LOAD`.
    """
    usable = usable_cores()
    threads = given_threads() or usable
    if threads == 1 or any(name in os.environ for name in _SETTINGS):
        return
    # Others take cores, of which there may be more than a quota allows to use.
    if threads > usable or threads + (running or _others_running)() > _cores():
        os.environ["OMP_WAIT_POLICY"] = "passive"
    elif threads <= _MOST_BOUNDED_THREADS:
        os.environ["GOMP_SPINCOUNT"] = str(_SPIN_ROUNDS)


def _others_running() -> int:
    """The smallest number running in a few samples: threads that run throughout are computing."""
    found = []
    for _ in range(_SAMPLES):
        try:
            found.append(int(LOAD.read_text(encoding="ascii").split()[3].partition("/")[0]) - 1)
        except (OSError, ValueError, IndexError):
            return 0
        if found[-1] <= 0:
            return 0
        time.sleep(_PAUSE_SECONDS)
    return min(found)
