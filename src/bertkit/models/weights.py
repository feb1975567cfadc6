"""Weights between their names here and their names on the Hub.

A family gives a table from module names to Hub names, in which `{n}` stands for a layer's number; this file applies
such tables in both directions, and says which weights are missing, unexpected, of another shape or newly drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from bertkit.errors import DataError

Names = Mapping[str, str]


def prefixed(names: Names, here: str, hub: str) -> dict[str, str]:
    """The same table one level further down on both sides."""
    return {here + name: hub + hub_name for name, hub_name in names.items()}


def to_hub_names(parameters: Iterable[str], names: Names) -> dict[str, str]:
    """The Hub's name of every parameter, by its name here; the longest matching module name decides.

    Raises:
        KeyError: if a parameter is in no module of the table.
    """
    rules = [(re.compile(_pattern(here) + r"\.(?P<leaf>\w+)"), hub) for here, hub in _longest_first(names)]
    found: dict[str, str] = {}
    for parameter in parameters:
        for rule, hub in rules:
            match = rule.fullmatch(parameter)
            if match:
                layer = match.groupdict().get("n") or ""
                found[parameter] = f"{hub.replace('{n}', layer)}.{match['leaf']}"
                break
        else:
            raise KeyError(f"no Hub name for parameter {parameter}")
    return found


def _longest_first(names: Names) -> list[tuple[str, str]]:
    return sorted(names.items(), key=lambda pair: -len(pair[0]))


def _pattern(name: str) -> str:
    return re.escape(name).replace(re.escape("{n}"), r"(?P<n>\d+)")


@dataclass
class WeightReport:
    """What became of the weights when a model was loaded, by their Hub names.

    Attributes:
        loaded: taken from the file.
        missing: the model has it, the file does not; drawn anew where it belongs to a head.
        unexpected: the file has it, the model does not.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def load_weights(module: nn.Module, tensors: Mapping[str, Tensor], names: Names, *, source: str) -> WeightReport:
    """Copy tensors under Hub names into the module.

    Args:
        module: what to fill; parameters that the file lacks stay as they are and are reported as missing.
        tensors: by Hub name.
        names: the module's table.
        source: the file, for messages.

    Raises:
        DataError: if a tensor has another shape than its parameter; names all of them.
    """
    state = module.state_dict()
    hub_names = to_hub_names(state, names)
    report = WeightReport(unexpected=sorted(set(tensors) - set(hub_names.values())))
    faults = []
    for name, hub_name in hub_names.items():
        if hub_name not in tensors:
            report.missing.append(hub_name)
        elif tensors[hub_name].shape != state[name].shape:
            shape, wanted = tuple(tensors[hub_name].shape), tuple(state[name].shape)
            faults.append(f"{hub_name} has shape {shape}, the configuration wants {wanted}")
        else:
            state[name].copy_(tensors[hub_name])
            report.loaded.append(hub_name)
    if faults:
        raise DataError(f"{source}: " + "; ".join(faults))
    return report
