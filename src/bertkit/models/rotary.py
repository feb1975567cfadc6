"""Rotary positions: queries and keys are turned by their position, so that scores depend on distance alone.

Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.2.2. Differs from the paper in which dimensions make a pair: i and
i + H/2, as GPT-NeoX has it, in place of neighbours.

Shapes: T packed tokens, N heads, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryTable:
    """The angle of each token's position: cosines and sines, each (T, 1, H), of which the halves are equal."""

    def __init__(self, positions_T: Tensor, head_width: int, theta: float) -> None:
        pair = torch.arange(0, head_width, 2, device=positions_T.device).float()
        angle_TH = positions_T.float()[:, None] * (1 / theta ** (pair / head_width))
        angle_T1H = torch.cat([angle_TH, angle_TH], dim=-1)[:, None]
        self.cosine_T1H, self.sine_T1H = angle_T1H.cos(), angle_T1H.sin()

    def turn(self, rows_TNH: Tensor) -> Tensor:
        """Turn each pair (i, i + H/2) of queries or keys, in single precision: (T, N, H)."""
        first, second = rows_TNH.float().chunk(2, dim=-1)
        crossed_TNH = torch.cat([-second, first], dim=-1)
        return (rows_TNH.float() * self.cosine_T1H + crossed_TNH * self.sine_T1H).to(rows_TNH.dtype)
