"""A surface: a strategy of hostile input, and a function that reads it.

A surface's function returns, or raises one of bertkit's errors; anything else is a finding. All files are below one
directory. Commands run in this process; commands that train are run only with `--plan`.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Surface:
    """One way for input to reach bertkit.

    Attributes:
        name: its name.
        inputs: a strategy.
        attack: reads one input.
        share: relative share of the inputs of a long attack.
    """

    name: str
    inputs: st.SearchStrategy[Any]
    attack: Callable[[Any], object]
    share: float = 1.0


class CodeError(AssertionError):
    """A command ended in an unexpected way."""


def written(path: Path, content: bytes) -> Path:
    """The file, with this content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def run_command(words: list[str], home: Path) -> None:
    """Run a command in this process, in `home`; its exit code must be one of the contract's, but not that of a bug."""
    from bertkit.cli.app import run

    before = Path.cwd()
    os.chdir(home)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as story:
            code = run(words)
    finally:
        os.chdir(before)
    if code not in (0, 2, 3, 5) or "Traceback" in story.getvalue():
        raise CodeError(f"{words}: exit {code}: {story.getvalue()[-600:]}")
