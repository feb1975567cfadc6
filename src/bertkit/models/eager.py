"""Functions that stay out of the graphs of compiled layers: attention, whose rectangles differ in number from batch to
batch, and dropout on a CPU, whose bits numpy draws.

Own design. torch.compiler.disable does it, but loads the compiler, which takes a second; so it is called only where
something is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_marked: list[Callable[..., Any]] = []
_outside: dict[Callable[..., Any], Callable[..., Any]] = {}


def never_traced(function: Function) -> Function:
    """Mark a function that compiled layers call through `eager`."""
    _marked.append(function)
    return function


def eager(function: Function) -> Function:
    """A marked function as it is to be called: in a compiled layer it is not traced."""
    return _outside.get(function, function)  # type: ignore[return-value]  # a wrapper of the same signature


def keep_out_of_graphs() -> None:
    """From now on marked functions are not traced; called before anything is compiled."""
    for function in _marked:
        if function not in _outside:
            _outside[function] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch leaves it untyped
