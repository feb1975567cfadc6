"""Training only the head, or unfreezing more layers with every epoch.

Howard and Ruder 2018, ULMFiT, arXiv:1801.06146, section 3.3 (gradual unfreezing). Sibling features.py also freezes the
encoder, but stores its states and adds an LSTM between it and the head.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bertkit.training.method import Method


class Frozen(Method):
    """The encoder is frozen and runs without dropout; its pooler and the head are trained."""

    name: Literal["frozen"] = "frozen"

    trains_head_alone: ClassVar[bool] = True

    def is_trained(self, depth: int, epoch: int) -> bool:
        return depth == 0


class GradualUnfreezing(Method):
    """Train the head first, then more layers with every epoch, from the top down; the embeddings last."""

    name: Literal["gradual"] = "gradual"
    layers_per_epoch: int = Field(1, ge=1, description="Number of layers that are unfrozen in each epoch.")

    def is_trained(self, depth: int, epoch: int) -> bool:
        return depth <= epoch * self.layers_per_epoch
