"""How long the threads of OpenMP spin while they wait for one another.

Nothing here follows a paper. A thread that waits spins on its core for a while before it sleeps, since waking takes
longer than most waits. GNU's library, which torch uses on Linux, spins for milliseconds: where another process has
taken the core of one thread, the others keep theirs, on which that thread could go on. benchmarks/shared_cores.py
measures what a bound costs and gains.
"""

from __future__ import annotations

import os

SPINS = 20_000
"""Rounds of a loop, some hundreds of microseconds."""
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def bound_spinning() -> None:
    """Let threads sleep after `SPINS` rounds, unless the environment decides it; effective before torch is imported."""
    if not any(name in os.environ for name in _SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
