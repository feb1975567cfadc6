"""The batch of an update whose loss or gradient was not finite, saved with the state of the run just before it.

Not from a paper. It is written as a checkpoint (run/checkpoint.py) with the batch next to the weights, so that
`replay-batch` restores the exact state, and its hashes reveal later changes. Sibling replay_batch.py recomputes it.

    nonfinite/step-00000012/     before update 12: weights, optimiser, generators, and batch.safetensors
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from bertkit.errors import DataError

DIRECTORY: Final = "nonfinite"
"""Directory name, within the run's directory."""

BATCH: Final = "batch"
"""The name of a batch's tensors in the checkpoint, and of its outline in the checkpoint's state."""

KEPT: Final = 2
"""Maximum number of saved batches of a run; the newest are kept."""


def packed_up(batches: Sequence[Any]) -> tuple[Any, dict[str, Tensor]]:
    """Micro-batches as an outline (a JSON value) and tensors by name."""
    tensors: dict[str, Tensor] = {}
    return [_outline(batch, str(number), tensors) for number, batch in enumerate(batches)], tensors


def unpacked(outline: Any, tensors: Mapping[str, Tensor], kind: type) -> list[Any]:
    """The micro-batches of `packed_up`.

    Args:
        outline, tensors: as saved.
        kind: class of a micro-batch; only this class and those in its fields are instantiated.

    Raises:
        DataError: the outline does not belong to such a batch.
    """
    classes = {each.__name__: each for each in _classes(kind)}
    try:
        return [_value(each, tensors, classes) for each in outline]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"the saved batch is not a {kind.__name__} of this version of bertkit ({error!r})") from error


def _outline(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(value)
        tensors[name] = tensor.contiguous().clone()
        return {"tensor" if isinstance(value, Tensor) else "array": name}
    if is_dataclass(value):
        own = {each.name: _outline(getattr(value, each.name), f"{name}.{each.name}", tensors) for each in fields(value)}
        return {"class": type(value).__name__, "fields": own}
    if isinstance(value, Mapping):
        return {"mapping": {key: _outline(item, f"{name}.{key}", tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        items = [_outline(item, f"{name}.{number}", tensors) for number, item in enumerate(value)]
        return {type(value).__name__: items}
    return {"value": value}


def _value(outline: Any, tensors: Mapping[str, Tensor], classes: Mapping[str, type]) -> Any:
    match outline:
        case {"tensor": name}:
            return tensors[name]
        case {"array": name}:
            return tensors[name].numpy()
        case {"class": name, "fields": own}:
            return classes[name](**{key: _value(item, tensors, classes) for key, item in own.items()})
        case {"mapping": own}:
            return {key: _value(item, tensors, classes) for key, item in own.items()}
        case {"list": items}:
            return [_value(item, tensors, classes) for item in items]
        case {"tuple": items}:
            return tuple(_value(item, tensors, classes) for item in items)
        case {"value": value}:
            return value
    raise ValueError(f"{outline!r:.80}")


def _classes(kind: Any, seen: frozenset[type] = frozenset()) -> set[type]:
    """The data classes in a type, and in their fields."""
    if isinstance(kind, types.GenericAlias | types.UnionType) or get_args(kind):
        return set().union(*(_classes(each, seen) for each in get_args(kind)))
    if not is_dataclass(kind) or not isinstance(kind, type) or kind in seen:
        return set()
    return {kind}.union(*(_classes(each, seen | {kind}) for each in get_type_hints(kind).values()))
