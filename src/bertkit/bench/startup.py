"""How long the command line takes to start, compared with Python itself and the imports of large libraries.

Not from a paper. Each side is a separate process, started alternately; after the first start, files are in the system's
cache.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from bertkit.bench.settings import BenchSettings
from bertkit.bench.workload import Peers, Work, Workload
from bertkit.errors import DataError

_PYTHON = (sys.executable,)
_COMMAND = (*_PYTHON, "-m", "bertkit")
OWN_SIDES = {
    "bertkit --help": (*_COMMAND, "--help"),
    "bertkit --version": (*_COMMAND, "--version"),
    "bertkit embed --help": (*_COMMAND, "embed", "--help"),
}
"""The others are compared with the first one."""
_IMPORT = re.compile(r"^import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)$", re.MULTILINE)
SHOWN_PACKAGES = 6


def startup(settings: BenchSettings) -> Workload:
    """Starts of processes.

    Raises:
        DataError: a process fails.
    """
    peers = Peers(wanted=settings.peers)
    peers.sides["python"] = partial(ended, (*_PYTHON, "-c", "pass"))
    for name in ("torch", "transformers"):
        peers.add(f"import {name}", partial(_importing, name))
    own: dict[str, Work] = {name: partial(ended, words) for name, words in OWN_SIDES.items()}
    return Workload(
        about={"python": sys.version.split()[0]},
        unit="starts",
        amount=1,
        sides={**own, **peers.sides},
        left_out=peers.left_out,
        parts=time_by_package,
    )


def _importing(name: str) -> Work:
    return partial(ended, (*_PYTHON, "-c", f"import {name}"))


def ended(words: Sequence[str]) -> str:
    """What a process wrote to stderr, after it has ended.

    Raises:
        ImportError: the process does not find a module.
        DataError: the process fails for another reason.
    """
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if missing := re.match(r"ModuleNotFoundError: No module named '([\w.]+)'", last):
            raise ImportError(last, name=missing[1])
        raise DataError(f"{' '.join(words)}: ended with {done.returncode}: {last}")
    return done.stderr


def time_by_package() -> dict[str, float]:
    """The share of each package in the time that `bertkit --help` spends on imports, largest first."""
    first = next(iter(OWN_SIDES.values()))
    return shares_by_package(ended((first[0], "-X", "importtime", *first[1:])))


def shares_by_package(importtime: str) -> dict[str, float]:
    """The same, from the output of Python's `-X importtime`; small shares are added up."""
    microseconds: dict[str, int] = defaultdict(int)
    for own, module in _IMPORT.findall(importtime):
        microseconds[module.partition(".")[0]] += int(own)
    whole = max(1, sum(microseconds.values()))
    ranked = sorted(microseconds.items(), key=lambda pair: -pair[1])
    shares = {f"import {name}": own / whole for name, own in ranked[:SHOWN_PACKAGES]}
    return shares | {"other imports": sum(own for _, own in ranked[SHOWN_PACKAGES:]) / whole}
