"""What all quantised parts have in common: the grid that numbers are rounded to, and that they are not trained.

Nothing here follows a paper. Sibling int8.py has parts of eight bits, low_bit.py those of fewer; quantised.py puts them
into a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Self

import torch
from torch import Tensor, nn

from bertkit.errors import DataError

REFUSAL = (
    "the model is quantised and cannot be trained; train the model that it was made from (export.json beside it names"
    " it), and quantise the result"
)


class Kept:
    """What is made of weights when it is first asked for; copies of its owner and files do not have it."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, what: Hashable, make: Callable[[], Any]) -> Any:
        """What was made under this key."""
        if what not in self._made:
            # It outlives the pass that asks for it, and a later one may want gradients of other things.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._made[what] = make()
        return self._made[what]

    def clear(self) -> None:
        """Have everything made anew."""
        self._made.clear()

    def __deepcopy__(self, _memo: dict[int, Any]) -> Kept:
        return Kept()

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()


class QuantisedPart(nn.Module, ABC):
    """A part of a model whose weights are whole numbers, which have no gradient.

    Attributes:
        kept: what was made of them, for as long as they stay where they are.
    """

    kept: Kept

    @property
    @abstractmethod
    def num_weights(self) -> int:
        """How many weights it has, however they are kept; biases, which are floats, are not among them."""

    def train(self, mode: bool = True) -> Self:
        """Raises:
        DataError: for training.
        """
        if mode:
            raise DataError(REFUSAL)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """To another device, say."""
        self.kept.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self


def levels_of(bits: int) -> int:
    """L, the largest whole number of a symmetric quantisation."""
    return int(2 ** (bits - 1) - 1)


def round_to(values: Tensor, threshold: float | Tensor, levels: int) -> Tensor:
    """`values` on the grid of the threshold: what quantising and reading back leaves of them."""
    scale = levels / threshold
    return values.mul(scale).round_().clamp_(-levels, levels).div_(scale)
