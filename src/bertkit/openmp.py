"""How OpenMP threads wait for one another on a machine where other processes compute.

Not from a paper. A waiting thread spins on its core for a while before it sleeps, since waking takes longer than most
waits. GNU's library, which torch uses on Linux, spins for milliseconds: if another process has taken the core of one
thread, the others keep theirs busy, although that thread could continue there. With two threads, 400 rounds of spinning
cost 2 to 3% of the speed on a quiet machine and keep 54 to 59% of it next to a process that computes, where the
library's own bound of 300,000 keeps 34%. Threads that sleep at once lose 6 to 10% on a quiet machine, so they are used
only if other processes are computing when a command starts (benchmarks/shared_cores.py measures all three).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LOAD = Path("/proc/loadavg")
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_SAMPLES = 5
_PAUSE_SECONDS = 0.002
_SPIN_ROUNDS = 400
_MOST_BOUNDED_THREADS = 4
"""More threads wait for one another more often, and each takes its time to wake: there the cost was not measured."""


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(threads: int) -> str:
    """A number of threads for display, such as "1 thread"."""
    return f"{threads} {'thread' if threads == 1 else 'threads'}"


def limit_spinning(running: Callable[[], int] | None = None) -> None:
    """Let waiting threads sleep if there are fewer cores than threads and currently computing processes, and let a few
    threads spin briefly otherwise, unless the environment decides how they wait. Has an effect only before torch is
    imported.

    Args:
        running: returns how many other threads of the machine compute now; None: read from `LOAD`.
    """
    cores = usable_cores()
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = (int(given) if given.isdecimal() else 0) or cores  # the library ignores a 0, too
    if threads == 1 or any(name in os.environ for name in _SETTINGS):
        return
    if threads + (running or _others_running)() > cores:
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
