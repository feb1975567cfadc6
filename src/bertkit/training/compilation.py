"""Compiled layers: torch.compile fuses the small operations between matrix products.

Ansel et al. 2024, PyTorch 2, ASPLOS. One graph serves all layers of a class and any number of tokens. A layer's
`forward` is replaced, as in activation_checkpointing.py, so parameters keep their names. Passes without gradients or
with a recorder are not compiled.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from bertkit.errors import UsageError
from bertkit.models.attention.varlen import detect_kernels
from bertkit.models.headed import HeadedModel
from bertkit.models.layers import PostNormLayer, PreNormLayer
from bertkit.models.operators.eager import disable_compile
from bertkit.models.operators.vocabulary import graphed_cross_entropy, use_graph
from bertkit.models.recorder import Scope

log = logging.getLogger(__name__)

COMPILED = (PostNormLayer, PreNormLayer)
"""The layers whose graph gives the same numbers as the plain code (tested)."""


def compile_layers(model: HeadedModel, *, backend: str = "inductor") -> None:
    """Compile the layers of a model and its companions for training; compilation happens at first use.

    Args:
        model: on its device.
        backend: of torch.compile.

    Raises:
        UsageError: the family's layers cannot be compiled, or there is no compiler.
    """
    device = model.encoder.word_embedding.weight.device
    for each in (model, *model.named_companions().values()):
        layers = list(each.encoder.recomputable_layers())
        if not layers or not all(isinstance(layer, COMPILED) for layer in layers):
            raise UsageError(
                f"engine.compile is true, but the layers of family {each.encoder.config.model_type} cannot be compiled"
                " yet; leave it out"
            )
    if backend == "inductor":
        _require_compiler(device)
    disable_compile()
    detect_kernels(device)
    for each in (model, *model.named_companions().values()):
        layers = list(each.encoder.recomputable_layers())
        for layer in layers:
            # Within the stack, states may be low-precision (PostNorm.normed_sum); heads read the last layer's.
            layer.forward = CompiledForward(layer, backend, torch.float32 if layer is layers[-1] else None)
    if device.type == "cpu":
        log.warning(
            "engine.compile: on a CPU, compiled layers have been slower than plain ones, and compiling takes minutes"
        )


def _require_compiler(device: torch.device) -> None:
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UsageError("engine.compile is true, but triton is not installed; install it, or leave engine.compile out")
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise UsageError("engine.compile is true, but there is no C++ compiler; install g++ or clang++, or unset it")


class CompiledForward:
    """Replaces a layer's `forward` with an equal one, compiled if gradients are computed and nothing is recorded.

    Args:
        layer: an instance of the class with the original `forward`.
        backend: of torch.compile.
        dtype: of the returned states; None: not converted.
    """

    def __init__(self, layer: nn.Module, backend: str, dtype: torch.dtype | None = None) -> None:
        self.layer = layer
        self.backend = backend
        self.dtype = dtype

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        kind = type(self.layer)
        if not torch.is_grad_enabled() or any(map(_is_recorded, (*arguments, *named.values()))):
            return kind.forward(self.layer, *arguments, **named)
        states_TD = _compiled(kind.forward, self.backend)(self.layer, *arguments, **named)
        return states_TD if self.dtype is None else states_TD.to(self.dtype)


def compile_losses(device: torch.device, *, wanted: bool) -> None:
    """Compute cross-entropies over a vocabulary in one graph on a GPU, if requested."""
    graph = device.type == "cuda" and wanted
    use_graph(_compiled(graphed_cross_entropy, "inductor") if graph else None)


@cache
def _compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    # torch's dropout draws four random numbers at once, a graph's one, which on a GPU takes longer than the next norm.
    options: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}
    if backend != "inductor":
        return torch.compile(forward, dynamic=True, backend=backend)
    return torch.compile(forward, dynamic=True, options=options)


def _is_recorded(argument: Any) -> bool:
    return isinstance(argument, Scope) and argument.recorder is not None
