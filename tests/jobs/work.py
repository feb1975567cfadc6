"""Functions run as jobs in tests, in a separate file because a worker process has to import them."""

from __future__ import annotations

import gc
import os
import signal
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bertkit.errors import UsageError


def square(number: int) -> int:
    return number * number


def many_bytes(number: int) -> bytes:
    """More than a pipe's buffer."""
    return bytes([number]) * (1 << 20)


def killed_until(path: Path, times: int) -> int:
    """Kills its process this many times, like the kernel when out of memory; then returns the number of kills."""
    before = len(path.read_text()) if path.exists() else 0
    if before < times:
        path.write_text("x" * (before + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return before


def dies_while_replying(path: Path) -> int:
    """Ends its process in the middle of a reply, the first time."""
    if path.exists():
        return 1
    path.touch()
    for each in gc.get_objects():
        if isinstance(each, Connection) and each.writable:
            os.write(each.fileno(), struct.pack("!i", 1 << 20) + b"x")
    os._exit(9)


def refused() -> None:
    raise UsageError("optimisation.steps: a fault of the user's")


def fails() -> None:
    raise ZeroDivisionError("a bug")


def raises(error: Exception) -> None:
    raise error


def waits(marker: Path) -> None:
    """Wait until stopped."""
    marker.write_text("")
    time.sleep(600)


def saves(marker: Path) -> None:
    """Wait for SIGTERM and then end normally, like a run that saves a checkpoint."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
    marker.write_text("")
    while not told:
        time.sleep(0.05)


def threads() -> int:
    import torch

    return torch.get_num_threads()


def written(path: Path, text: str) -> dict[str, str]:
    """A file and its hash."""
    from bertkit.jobs.manifest import hashes

    path.write_text(text)
    return hashes([path])
