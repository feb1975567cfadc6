"""Activation checkpointing: layers store only their inputs and are recomputed in the backward pass.

Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, with one segment per layer. The
second pass starts from the first one's generator state, so dropout masks are the same and gradients bit-identical.
torch's own checkpoint_wrapper wraps the layer in a module, which renames its parameters; here the layer's `forward` is
replaced, which is invisible to files and optimiser.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Scope


def checkpoint_layers(model: HeadedModel) -> None:
    """Let the layers of a model and its companions store only their inputs for the backward pass.

    Raises:
        UsageError: the family's layers cannot be recomputed one by one.
    """
    for each in (model, *model.named_companions().values()):
        layers = list(each.encoder.recomputable_layers())
        if not layers:
            raise UsageError(
                f"engine.activation_checkpointing is true, but the layers of family {each.encoder.config.model_type}"
                " cannot be recomputed one by one; leave it out, and lower engine.micro_batch_tokens"
            )
        for layer in layers:
            layer.forward = RecomputedForward(layer)


class RecomputedForward:
    """Replaces a layer's `forward` with an equal one that stores only the inputs if gradients are computed.

    Args:
        layer: an instance of the class with the original `forward`.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*arguments, **named)
        passes = count()

        def computed(*arguments: Any, **named: Any) -> Any:
            if next(passes):
                arguments = tuple(map(_for_second_pass, arguments))
                named = {name: _for_second_pass(argument) for name, argument in named.items()}
            return self._plain(*arguments, **named)

        return checkpoint(computed, *arguments, use_reentrant=False, **named)

    def _plain(self, *arguments: Any, **named: Any) -> Any:
        return type(self.layer).forward(self.layer, *arguments, **named)


def _for_second_pass(argument: Any) -> Any:
    """A layer's argument in its second pass: a recorder edits as before, but records nothing for the caller."""
    if isinstance(argument, Scope) and argument.recorder is not None:
        return Scope(argument.recorder.also(()), argument.prefix)
    return argument
