"""Batches in pinned memory, so that copies to the GPU overlap with the previous step.

torch copies pageable memory before it returns, and pinned memory in the background (`non_blocking`). Batches are pinned
by the thread or process that prepares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


def pinned(value: Value) -> Value:
    """The same batch, or list of batches, with all tensors pinned; needs a GPU."""
    return with_tensors(value, Tensor.pin_memory)


def moved(value: Value, device: torch.device) -> Value:
    """The same batch with all tensors on a device; copies of pinned memory run in the background."""
    return with_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without waiting for pending work of the GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def with_tensors(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    """The same data classes, mappings, lists and tuples with their tensors replaced."""
    changed: Any = value
    if isinstance(value, Tensor):
        changed = change(value)
    elif is_dataclass(value) and not isinstance(value, type):
        own = {each.name: with_tensors(getattr(value, each.name), change) for each in fields(value)}
        changed = replace(value, **own)
    elif isinstance(value, Mapping):
        changed = {name: with_tensors(item, change) for name, item in value.items()}
    elif isinstance(value, list | tuple):
        changed = type(value)(with_tensors(item, change) for item in value)
    result: Value = changed
    return result
