"""Which layers attend to all tokens and which to those nearby, for families whose configuration names both kinds.

Beltagy et al. 2020, Longformer, arXiv:2004.05150, section 3.1, for windows; the names are those of the Hub's files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal

from bertkit.settings import UnreadKey

LayerType = Literal["full_attention", "sliding_attention"]


def every_so_many(layers: int, interval: int, *, first: int) -> tuple[LayerType, ...]:
    """The types of so many layers, of which every `interval`-th is global; the first layer has the number `first`."""
    numbers = range(first, first + layers)
    return tuple("sliding_attention" if number % interval else "full_attention" for number in numbers)


def require_type_of_each(types: Collection[LayerType] | None, layers: int) -> None:
    """Raise ValueError if types are named for another number of layers."""
    if types is not None and len(types) != layers:
        raise ValueError(f"layer_types names {len(types)} layers, but num_hidden_layers is {layers}")


def unread_without(types: Collection[LayerType], *, window: str) -> Iterator[UnreadKey]:
    """The settings that no layer reads: those of local layers, of which `window` is one, or of global ones."""
    if "sliding_attention" not in types:
        yield UnreadKey(window, "no layer is local")
        yield UnreadKey("local_rope_theta", "no layer is local")
    if "full_attention" not in types:
        yield UnreadKey("global_rope_theta", "no layer is global")
