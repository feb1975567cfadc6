"""An exponential moving average of the weights, which is evaluated and saved instead of the last ones.

Polyak and Juditsky 1992 (averaging); the exponential form as in Charpentier and Samuel 2024, arXiv:2410.24159 (released
train_10m.py): after each update, average = decay * average + (1 - decay) * weights, starting from the initial weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bertkit.errors import DataError
from bertkit.training.model_state import copy_weights


class WeightAverage:
    """The running average of a model's parameters, with shared ones included once.

    Args:
        model: its current weights are the initial average.
        decay: weight of the old average in each update, between 0 and 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after an update to the average."""
        weights = [parameter.detach() for parameter in self.model.parameters()]
        torch._foreach_lerp_(list(self.tensors.values()), weights, 1 - self.decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the context, the model has the average's weights; afterwards its own again, bit-identical."""
        own = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.take()
        try:
            yield
        finally:
            copy_weights(self.model, own)

    def take(self) -> None:
        """Replace the model's weights with the average permanently."""
        copy_weights(self.model, self.tensors)

    def restore(self, tensors: Mapping[str, Tensor] | None, source: str) -> None:
        """Continue from a checkpoint's average.

        Raises:
            DataError: the checkpoint has no average, or one of other weights.
        """
        if tensors is None or tensors.keys() != self.tensors.keys():
            raise DataError(
                f"{source}: contains no average of these weights, but optimisation.ema has to continue one; resume with"
                " the recipe that began the run, or start a new run"
            )
        for name, average in self.tensors.items():
            average.copy_(tensors[name])
