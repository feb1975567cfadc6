"""What is attacked: a strategy of hostile input, and a function that reads it.

A surface's function returns, or raises an error of bertkit's; anything else is a finding. All files are below one
directory. Commands run in this process; those that train are asked for their plan alone.
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
    """A way for input into bertkit.

    Attributes:
        name: of it.
        inputs: a strategy.
        attack: reads one input.
        share: of the inputs of a long attack, in relation to the others.
    """

    name: str
    inputs: st.SearchStrategy[Any]
    attack: Callable[[Any], object]
    share: float = 1.0


class CodeError(AssertionError):
    """A command ended otherwise than it may."""


def written(path: Path, content: bytes) -> Path:
    """The file, with this content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def run_command(words: list[str], home: Path) -> None:
    """Run a command in this process, in `home`; its exit code is one of the contract's, and never that of a bug."""
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
