"""Hook points: where a recorder reads and edits the tensors of a forward pass.

A model passes the tensor of every named point to the recorder, if there is one, and continues with the returned tensor;
without a recorder the fast path runs unchanged. Points have TransformerLens's names: `hook_embed`,
`blocks.3.attn.hook_pattern`, `blocks.3.hook_resid_post`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping

from torch import Tensor

Edit = Callable[[Tensor], Tensor]


class Recorder:
    """Keeps the tensors of some points and replaces those of others.

    Args:
        wanted: names of the points to keep.
        edits: functions that replace a point's tensor, by name; they run before the tensor is kept.

    Attributes:
        kept: tensors of the last forward pass, by name, still attached to the graph.
    """

    def __init__(self, wanted: Collection[str] = (), edits: Mapping[str, Edit] | None = None) -> None:
        self.wanted = frozenset(wanted)
        self.edits = dict(edits or {})
        self.kept: dict[str, Tensor] = {}

    def also(self, points: Collection[str]) -> Recorder:
        """A copy that keeps these points as well."""
        other = copy.copy(self)
        other.wanted, other.kept = self.wanted | frozenset(points), {}
        return other

    def needs(self, point: str) -> bool:
        """Whether a point must be computed; the fast path does not compute attention maps, for example."""
        return point in self.wanted or point in self.edits

    def needs_within(self, prefix: str) -> bool:
        """Whether any point with this prefix must be computed."""
        return any(point.startswith(prefix) for point in (*self.wanted, *self.edits))

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        if point in self.edits:
            tensor = self.edits[point](tensor)
        if point in self.wanted:
            self.kept[point] = tensor
        return tensor


class Scope:
    """A recorder that prefixes the names of one module's points."""

    def __init__(self, recorder: Recorder | None, prefix: str) -> None:
        self.recorder = recorder
        self.prefix = prefix

    def needs(self, point: str) -> bool:
        return self.recorder is not None and self.recorder.needs(self.prefix + point)

    def tap(self, point: str, tensor: Tensor) -> Tensor:
        return tensor if self.recorder is None else self.recorder(self.prefix + point, tensor)

    def within(self, prefix: str) -> Scope:
        # Without a recorder names are unused, and all layers can share one compiled graph.
        return self if self.recorder is None else Scope(self.recorder, self.prefix + prefix)
