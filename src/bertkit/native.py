"""Compiling C++ files into libraries, once per version, stored in the cache and loaded through ctypes.

Not from a paper. The files have no dependencies, so a compiler alone suffices; a machine without one computes the same
results without them. Callers: loops that replace torch's operators (kernels/), words of a corpus
(text/compiled_words.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertkit.cache import cache_file
from bertkit.files import cache_directory, sha256_of

COMPILERS = ("c++", "g++", "clang++")
BUILD_SECONDS = 120.0
_KIND = "kernels"


class CompilerError(Exception):
    """A library cannot be built or stored; the message states why in one line."""


def compiler() -> str:
    """The path of the C++ compiler.

    Raises:
        CompilerError: no compiler was found.
    """
    found = next((path for name in COMPILERS if (path := shutil.which(name)) is not None), None)
    if found is None:
        raise CompilerError(f"no C++ compiler was found ({', '.join(COMPILERS)})")
    return found


def compiler_version(path: str) -> str:
    """A compiler's version in one line, empty if it prints none; CompilerError if it cannot be used."""
    return next(iter(_output_of([path, "--version"]).splitlines()), "")


def library_file(sources: Sequence[Path], flags: Sequence[str], identity: Any, root: Path | None = None) -> Path:
    """The path of the library built from these files; its directory is created.

    Args:
        sources: the files it is built from, including those that they include.
        flags: of the compiler.
        identity: everything else that decides it, as a JSON value.
        root: of all caches; None: `cache_directory()`.

    Raises:
        OSError: the cache cannot be written.
    """
    content = {"source": [sha256_of(path) for path in sources], "flags": list(flags), **identity}
    return cache_file(root or cache_directory(), _KIND, content, ".so")


def build_library(path: Path, sources: Sequence[Path], flags: Sequence[str]) -> None:
    """Build a library from these files, if it does not exist.

    Raises:
        CompilerError: there is no compiler, or it fails.
        OSError: the cache cannot be written.
    """
    if path.exists():
        return
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _output_of([compiler(), *flags, "-o", str(made), *map(str, sources)])
        with made.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(made, path)


def _output_of(command: list[str]) -> str:
    """The output of a compiler."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=BUILD_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]} cannot be used ({error})") from error
    if done.returncode:
        raise CompilerError(f"{command[0]} fails: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return done.stdout
