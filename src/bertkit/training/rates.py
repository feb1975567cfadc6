"""The learning rate of each parameter as a multiple of the schedule's: groups by name, layer-wise decay, freezing.

Sun et al. 2020, MobileBERT, arXiv:2004.02984, section 3.4 (one layer at a time, the others slow or frozen); Clark et
al. 2020, ELECTRA, arXiv:2003.10555, appendix B (layer-wise decay: training/method.py). All are factors per parameter,
which are multiplied. A parameter with factor 0 gets no gradient: no optimiser moves or decays it, and its moments are
unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from pydantic import Field
from torch import nn

from bertkit.errors import UsageError
from bertkit.settings import Settings

_ENCODER = "encoder."
_SHOWN = 8
"""Maximum number of names listed in an error."""


class RateGroup(Settings):
    """Parameters with their own learning rate: `{parameters: layers.3, rate: 0.3}`."""

    parameters: str | tuple[str, ...] = Field(
        min_length=1,
        description="Names of parameters or of parts of the model, with the wildcards *, ? and [0-9]: layers.3,"
        " embeddings.*, *.bias, masked_lm; those of the encoder without a leading encoder. A list: any of them.",
    )
    rate: float = Field(
        ge=0,
        description="Learning rate of these parameters as a multiple of the schedule's; 0: frozen, and without"
        " weight decay.",
    )

    @property
    def patterns(self) -> tuple[str, ...]:
        """All names."""
        return (self.parameters,) if isinstance(self.parameters, str) else self.parameters

    def holds(self, name: str) -> bool:
        """Whether the group names this parameter."""
        return any(fnmatchcase(each, pattern) for pattern in self.patterns for each in _owners(name))


def group_rates(names: Iterable[str], groups: Sequence[RateGroup]) -> dict[str, float]:
    """The factor of each parameter's learning rate: that of the first group that names it, or 1.

    Args:
        names: of the model's parameters.
        groups: in order.

    Raises:
        UsageError: a group names no parameter, or only parameters of earlier groups; or all would be frozen.
    """
    left = list(names)
    rates = dict.fromkeys(left, 1.0)
    for number, group in enumerate(groups):
        named = {name for name in left if group.holds(name)}
        if not named:
            raise UsageError(
                f"optimisation.groups.{number}.parameters: {_unknown(group, list(rates), any(map(group.holds, rates)))}"
            )
        rates |= dict.fromkeys(named, group.rate)
        left = [name for name in left if name not in named]
    if groups and not any(rates.values()):
        raise UsageError("optimisation.groups: every parameter is frozen; give a group a rate above 0")
    return rates


def _owners(name: str) -> list[str]:
    """The names of the parameter and of the modules that contain it; those in the encoder also without `encoder.`."""
    words = name.split(".")
    whole = [".".join(words[:count]) for count in range(1, len(words) + 1)]
    return whole + [each.removeprefix(_ENCODER) for each in whole if each.startswith(_ENCODER)]


def _unknown(group: RateGroup, names: Sequence[str], taken: bool) -> str:
    shown = " or ".join(repr(pattern) for pattern in group.patterns)
    if taken:
        return f"earlier groups have already taken all that {shown} names; write the more specific groups first"
    parts = list(dict.fromkeys(".".join(name.removeprefix(_ENCODER).split(".")[:2]) for name in names))
    near = get_close_matches(group.patterns[0].rstrip(".*"), parts, n=1)
    more = ", ..." if len(parts) > _SHOWN else ""
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(parts[:_SHOWN])}{more}"
    return f"the model has no parameter or part called {shown}; {hint}"


class ParameterRates:
    """Applies the factors to an optimiser and its model; they can be set repeatedly.

    Args:
        model: whose parameters the optimiser has.
        optimizer: its groups are split so that each has a single factor (`lr_scale`), which `Step` multiplies
            by the schedule's learning rate.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._optimizer = optimizer
        self._built = [dict(group) for group in optimizer.param_groups]
        self._frozen: list[nn.Parameter] = []

    def set(self, factors: Mapping[str, float], decay_divisors: Mapping[str, float] | None = None) -> None:
        """Give each parameter this multiple of the learning rate that the optimiser was built with.

        Args:
            factors: by parameter name; 1 if missing.
            decay_divisors: by parameter name, what its weight decay is divided by; 1 if missing. Decay is multiplied by
                the learning rate, so a part of a factor that is also given here does not change it.
        """
        decay_divisors = decay_divisors or {}
        self.thaw()
        if all(factors.get(name, 1.0) == 1.0 for name in self._names.values()):
            self._optimizer.param_groups[:] = self._built
            return
        groups: list[dict[str, Any]] = []
        for built in self._built:
            alike: dict[tuple[float, float], list[nn.Parameter]] = {}
            for parameter in built["params"]:
                name = self._names[parameter]
                alike.setdefault((factors.get(name, 1.0), decay_divisors.get(name, 1.0)), []).append(parameter)
            for (factor, divisor), parameters in alike.items():
                changed = {"lr_scale": built.get("lr_scale", 1.0) * factor}
                if divisor != 1.0:
                    changed["weight_decay"] = built["weight_decay"] / divisor
                groups.append({**built, "params": parameters, **changed})
        self._optimizer.param_groups[:] = groups
        self._frozen = [parameter for parameter, name in self._names.items() if not factors.get(name, 1.0)]
        self.freeze()

    def freeze(self) -> None:
        """Disable gradients of parameters with factor 0, even if a training method has enabled them since."""
        for parameter in self._frozen:
            parameter.requires_grad_(False)

    def thaw(self) -> None:
        """Re-enable gradients for what `set` froze."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []
