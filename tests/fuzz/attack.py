"""Fuzz every surface for a long time, in one process.

    python -m tests.fuzz.attack 50000 3600 [SEED] # number of inputs, maximum seconds

Findings are tracebacks, exit code 1, more than ten seconds of processor time, and more than 2 GB above the process's
previous memory. Each is printed once with its input; once fixed, add it to corpus.py.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from bertkit.errors import BertkitError
from tests.fuzz.surfaces import Surface, made_surfaces

SECONDS = 10
BYTES = 2 << 30


class HangError(BaseException):
    """An input took too long; no code in between catches this."""


@contextmanager
def limited() -> Iterator[None]:
    """Limit memory relative to current use, and silence bertkit's log."""
    logger = logging.getLogger("bertkit")
    before, level = resource.getrlimit(resource.RLIMIT_AS), logger.level
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, before[1]))
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        logger.setLevel(level)


def tried(surface: Surface, drawn: Any) -> str | None:
    """The finding for an input; None if it was read or refused."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise HangError(f"more than {SECONDS} seconds")

    # In processor time, because others may delay this process. A pause not caused by others would be a hang.
    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        surface.attack(drawn)
    except BertkitError as error:
        str(error).encode("utf-8", "surrogatepass")
    except HangError as hang:
        return f"hang: {hang}\n{_last(hang)}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:700]}\n{_last(error)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return None


def _last(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "hypothesis" not in frame.filename]
    return "\n".join(f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-6:])


def main(count: int, seconds: float, first_seed: int = 0) -> int:
    """Attack all surfaces; returns the number of different findings."""
    warnings.simplefilter("ignore")
    faulthandler.enable()
    counted: Counter[str] = Counter()
    findings: dict[str, str] = {}
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name:
        os.environ.update(
            BERTKIT_CACHE=f"{name}/cache", BERTKIT_RUNS=f"{name}/commands/runs", HOME=name, HF_HUB_OFFLINE="1"
        )
        surfaces = made_surfaces(Path(name) / "home")
        shares = sum(surface.share for surface in surfaces)
        rounds = 0
        while time.monotonic() < ends and counted.total() < count:
            for surface in surfaces:
                size = max(10, round(surface.share / shares * min(count, 4000)))
                if time.monotonic() < ends:
                    with limited():
                        _attack(surface, size, first_seed + rounds, counted, findings, ends)
            rounds += 1
    print("| surface | inputs |\n|---|---|")
    for name_, number in sorted(counted.items()):
        print(f"| {name_} | {number:,} |")
    print(f"{counted.total():,} inputs in {seconds - (ends - time.monotonic()):,.0f} s, {len(findings)} findings")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"largest resident memory {peak:.2f} GB")
    return len(findings)


def _attack(
    surface: Surface, size: int, number: int, counted: Counter[str], findings: dict[str, str], ends: float,
) -> None:  # fmt: skip
    @seed(number)
    @given(surface.inputs)
    @settings(
        max_examples=size, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def attack(drawn: Any) -> None:
        if time.monotonic() > ends:
            return
        counted[surface.name] += 1
        found = tried(surface, drawn)
        if found is not None:
            bug = re.search("a bug in bertkit: .{0,80}", found)
            where = f"{surface.name}: {bug.group() if bug else found.splitlines()[-1]}"
            if where not in findings:
                findings[where] = found
                print(f"FOUND {surface.name}: {found}\n  input: {drawn!r:.1500}\n", flush=True)

    attack()


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)))
