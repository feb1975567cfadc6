"""State that a model carries from a step's sequences to those that continue them: a memory, or an LSTM's states.

Dai et al. 2019, Transformer-XL, arXiv:1901.02860, section 3.2; Peters et al. 2018, ELMo, arXiv:1802.05365 (its released
code keeps the LSTM's states between batches). It has no gradient and is saved as part of the training state; a skipped
update does not change it. Each sequence has the state of its lane.

Shapes: B sequences of a micro-batch; lanes are the first axis of all tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch

State = Mapping[str, Tensor]
"""Tensors with one row per lane, by name."""


class CarriedState:
    """The state of all lanes. Micro-batches of a step read it and add to it lane by lane; `commit` ends the step."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._following: list[State] = []
        self._last_lane = -1

    def of(self, batch: PackedBatch) -> State | None:
        """The state that these sequences continue, on their device; None at the beginning.

        A lane that was already read in this step begins the next step.
        """
        lanes = (batch.host or batch).lanes
        assert lanes is not None, "only sequences of lanes continue others"
        first = int(lanes.number_B[0])
        if first <= self._last_lane:
            self.commit()
        self._last_lane = int(lanes.number_B[-1])
        if not self.tensors:
            return None
        own = slice(first, self._last_lane + 1)
        return {name: tensor[own].to(batch.ids_T.device) for name, tensor in self.tensors.items()}

    def add(self, state: State) -> None:
        """Add the new state of the sequences that were last read."""
        self._following.append({name: tensor.detach() for name, tensor in state.items()})

    def commit(self) -> None:
        """End a successful step: its sequences' new states become the state."""
        if self._following:
            names = self._following[0]
            self.tensors = {name: torch.cat([part[name] for part in self._following]) for name in names}
        self.drop()

    def drop(self) -> None:
        """End a skipped step: the state is unchanged."""
        self._following, self._last_lane = [], -1

    def clear(self) -> None:
        """Reset the state before other text."""
        self.drop()
        self.tensors = {}
