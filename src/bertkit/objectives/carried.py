"""What a model carries from a step's sequences to those that continue them: a memory, or the states of an LSTM.

Dai et al. 2019, Transformer-XL, arXiv:1901.02860, section 3.2; Peters et al. 2018, ELMo, arXiv:1802.05365 (its released
code keeps the LSTM's states between batches). It is part of the state of training, without gradient, and is saved with
it; an update that is skipped leaves it as it was. Each sequence finds its own by its lane.

Shapes: B sequences of a micro-batch, all tensors with the lanes in front.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bertkit.data.batch import BatchLanes

State = Mapping[str, Tensor]
"""By name, tensors with one row for each lane."""


class CarriedState:
    """The state of all lanes. Micro-batches of a step ask for it and add to it lane by lane; `commit` ends the step."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._following: list[State] = []
        self._last_lane = -1

    def of(self, lanes: BatchLanes) -> State | None:
        """The state that these sequences continue; None at the beginning.

        A lane that has had its turn begins the next step.
        """
        first = int(lanes.number_B[0])
        if first <= self._last_lane:
            self.commit()
        self._last_lane = int(lanes.number_B[-1])
        if not self.tensors:
            return None
        return {
            name: tensor[first : self._last_lane + 1].to(lanes.number_B.device) for name, tensor in self.tensors.items()
        }

    def add(self, state: State) -> None:
        """What the sequences just asked for leave behind."""
        self._following.append({name: tensor.detach() for name, tensor in state.items()})

    def commit(self) -> None:
        """The step is made: what its sequences left behind is the state."""
        if self._following:
            names = self._following[0]
            self.tensors = {name: torch.cat([part[name] for part in self._following]) for name in names}
        self.drop()

    def drop(self) -> None:
        """The step is not made: the state stays as it was."""
        self._following, self._last_lane = [], -1

    def clear(self) -> None:
        """Other text begins."""
        self.drop()
        self.tensors = {}
