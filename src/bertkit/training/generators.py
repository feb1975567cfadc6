"""The states of torch's generators, used by dropout: saved in checkpoints, and restored when an update is repeated.

Not from a paper (contract: exact resume). All other random draws are functions of their address (data/random.py) and
have no state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The generator states of a run on this device, by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """The inverse of `generator_states`; a state saved on another kind of device sets the generators that both have."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
