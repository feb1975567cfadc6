"""Rotary positions: queries and keys are rotated by their position, which makes scores depend only on distance.

Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.2.2. Differs from the paper in the pairs of dimensions: i and i +
H/2, as in GPT-NeoX, not neighbours.

Shapes: T packed tokens, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor


class _Turn(torch.autograd.Function):
    """Rotation whose backward pass rotates the gradient the other way: a rotation's transpose is its inverse. autograd
    would repeat every copy and half of the forward pass."""

    @staticmethod
    def forward(ctx: Any, rows_TNH: Tensor, cosine_T1H: Tensor, sine_T1H: Tensor) -> Tensor:
        ctx.save_for_backward(cosine_T1H, sine_T1H)
        ctx.save_for_forward(cosine_T1H, sine_T1H)
        return _turned(rows_TNH, cosine_T1H, sine_T1H)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosine_T1H, sine_T1H = ctx.saved_tensors
        return _turned(gradients[0], cosine_T1H, -sine_T1H), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        cosine_T1H, sine_T1H = ctx.saved_tensors
        return _turned(tangents[0], cosine_T1H, sine_T1H)


def _turned(rows_TNH: Tensor, cosine_T1H: Tensor, sine_T1H: Tensor) -> Tensor:
    single_TNH = rows_TNH.float()
    turned_TNH = single_TNH * cosine_T1H
    first, second = single_TNH.chunk(2, dim=-1)
    turned_first, turned_second = turned_TNH.chunk(2, dim=-1)
    turned_first.addcmul_(second, sine_T1H, value=-1)
    turned_second.addcmul_(first, sine_T1H)
    return turned_TNH.to(rows_TNH.dtype)


def _turned_by_halves(rows_TNH: Tensor, cosine_T1H: Tensor, sine_T1H: Tensor) -> Tensor:
    """`_turned` without in-place operations."""
    (first, second), cosine_T1h = rows_TNH.float().chunk(2, dim=-1), cosine_T1H.chunk(2, dim=-1)[0]
    halves = [first * cosine_T1h - second * sine_T1H, second * cosine_T1h + first * sine_T1H]
    return torch.cat(halves, dim=-1).to(rows_TNH.dtype)


class RotaryTable:
    """The angle of each token's position: cosines (T, 1, H) with two equal halves, and sines (T, 1, H/2).

    `factor` divides all angles."""

    def __init__(self, positions_T: Tensor, head_width: int, theta: float, *, factor: float = 1.0) -> None:
        self._set(positions_T, rotary_frequencies(head_width, theta, device=positions_T.device) / factor)

    @classmethod
    def of(cls, positions_T: Tensor, frequency_h: Tensor) -> Self:
        """From the angle per position of each pair of dimensions, (H/2,)."""
        table = cls.__new__(cls)
        table._set(positions_T, frequency_h)
        return table

    def _set(self, positions_T: Tensor, frequency_h: Tensor) -> None:
        angle_T1H = (positions_T.float()[:, None] * frequency_h)[:, None]
        cosine_T1H = angle_T1H.cos()
        self.cosine_T1H, self.sine_T1H = torch.cat([cosine_T1H, cosine_T1H], dim=-1), angle_T1H.sin()

    def turn(self, rows_TNH: Tensor) -> Tensor:
        """Rotate each pair (i, i + H/2) of queries or keys, in single precision: (T, N, H)."""
        if torch.compiler.is_compiling():  # its graph fuses the operations, but cannot contain a custom gradient
            return _turned_by_halves(rows_TNH, self.cosine_T1H, self.sine_T1H)
        turned: Tensor = _Turn.apply(rows_TNH, self.cosine_T1H, self.sine_T1H)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
        return turned


def rotary_frequencies(head_width: int, theta: float, *, device: torch.device | None = None) -> Tensor:
    """The angle per position of each pair of dimensions, (H/2,)."""
    pair = torch.arange(0, head_width, 2, device=device).float()
    return 1 / theta ** (pair / head_width)


def require_even_heads(width: int, heads: int) -> None:
    """Raise ValueError if the width of a head is odd, since dimensions rotate in pairs."""
    if width // heads % 2:
        raise ValueError(
            f"hidden_size / num_attention_heads is {width // heads}; rotary positions rotate pairs, so it must be even"
        )


def rope_theta_in(rope: Any, key: str, *, field: str = "rope_theta") -> dict[str, Any]:
    """The base theta in an object of config.json such as `{"rope_type": "default", "rope_theta": 10000.0}`, by the name
    of its setting; empty if the object is missing or contains none.

    Args:
        rope: the value of `key`.
        key: for messages.
        field: the setting.

    Raises:
        ValueError: not an object, or angles that are scaled in some way.
    """
    if rope is None:
        return {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{key} is {rope!r:.60}; expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))  # the second is the older name
    if kind != "default":
        raise ValueError(f"{key}.rope_type is {kind!r}; only 'default' is supported")
    theta = rope.get("rope_theta")
    return {} if theta is None else {field: theta}


def rope_to_hub(theta: float) -> dict[str, Any]:
    """The object that `rope_theta_in` reads."""
    return {"rope_type": "default", "rope_theta": theta}
