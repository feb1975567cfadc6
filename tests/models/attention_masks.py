"""Masks of full attention that the windowed forms are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from bertkit.models.attention.self_attention import Visible


def sliding_window(each_side: int) -> Visible:
    """Tokens attend to this many tokens on either side: Beltagy et al. 2020, Longformer, arXiv:2004.05150, 3.1."""

    def near(length: int, device: torch.device) -> Tensor:
        position_S = torch.arange(length, device=device)
        return (position_S[:, None] - position_S[None, :]).abs() <= each_side

    return near
