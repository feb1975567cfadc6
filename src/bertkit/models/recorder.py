"""The tap through which probes see and change what happens inside a model.

A model hands every named point to the recorder, where there is one, and goes on with what it gets back; with none,
nothing is looked up and the fast path runs untouched. Points carry the names that TransformerLens users know:
`hook_embed`, `blocks.3.attn.hook_pattern`, `blocks.3.hook_resid_post`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping

from torch import Tensor

Edit = Callable[[Tensor], Tensor]


class Recorder:
    """Keeps the tensors of the wanted points, and passes others through an edit.

    Args:
        wanted: names of the points to keep.
        edits: what to put in place of a point's tensor, by name; runs before the tensor is kept.

    Attributes:
        kept: what was recorded in the last forward pass, by name, still attached to the graph.
    """

    def __init__(self, wanted: Collection[str] = (), edits: Mapping[str, Edit] | None = None) -> None:
        self.wanted = frozenset(wanted)
        self.edits = dict(edits or {})
        self.kept: dict[str, Tensor] = {}

    def also(self, points: Collection[str]) -> Recorder:
        """A recorder like this one that keeps these points, too."""
        other = copy.copy(self)
        other.wanted, other.kept = self.wanted | frozenset(points), {}
        return other

    def needs(self, point: str) -> bool:
        """Whether a point must be computed at all: attention maps, for one, do not exist on the fast path."""
        return point in self.wanted or point in self.edits

    def needs_within(self, prefix: str) -> bool:
        """Whether any of the points whose names begin so must be computed."""
        return any(point.startswith(prefix) for point in (*self.wanted, *self.edits))

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        if point in self.edits:
            tensor = self.edits[point](tensor)
        if point in self.wanted:
            self.kept[point] = tensor
        return tensor


class Scope:
    """A recorder seen from one part of the model: prefixes the names of its points."""

    def __init__(self, recorder: Recorder | None, prefix: str) -> None:
        self.recorder = recorder
        self.prefix = prefix

    def needs(self, point: str) -> bool:
        return self.recorder is not None and self.recorder.needs(self.prefix + point)

    def tap(self, point: str, tensor: Tensor) -> Tensor:
        return tensor if self.recorder is None else self.recorder(self.prefix + point, tensor)

    def within(self, prefix: str) -> Scope:
        return Scope(self.recorder, self.prefix + prefix)
