"""Functions that stay out of the graphs of compiled layers: attention, because the number of rectangles differs between
batches, and dropout on a CPU, because numpy draws its bits.

torch.compiler.disable does this, but loads the compiler, which takes a second. It is therefore called only if something
is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_marked: list[Callable[..., Any]] = []
_outside: dict[Callable[..., Any], Callable[..., Any]] = {}


def exclude_from_compile(function: Function) -> Function:
    """Mark a function that compiled layers must call through `eager`."""
    _marked.append(function)
    return function


def eager(function: Function) -> Function:
    """The form of a marked function to call: in a compiled layer it is not traced."""
    return _outside.get(function, function)  # type: ignore[return-value]  # a wrapper of the same signature


def disable_compile() -> None:
    """Stop tracing marked functions from now on; call this before anything is compiled."""
    for function in _marked:
        if function not in _outside:
            _outside[function] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch leaves it untyped
