"""The methods of fine-tuning, by the name that a recipe gives them; a new one is one file and one entry."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bertkit.training.methods.base import Full, Method, Scratch, depth_below_head, scale_rates
from bertkit.training.methods.features import FeatureBased
from bertkit.training.methods.freelb import FreeLb
from bertkit.training.methods.frozen import Frozen, GradualUnfreezing
from bertkit.training.methods.lora import Lora

AnyMethod = Annotated[
    Full | Frozen | GradualUnfreezing | Lora | FeatureBased | FreeLb,
    Field(discriminator="name"),
]

__all__ = [
    "AnyMethod",
    "FeatureBased",
    "FreeLb",
    "Frozen",
    "Full",
    "GradualUnfreezing",
    "Lora",
    "Method",
    "Scratch",
    "depth_below_head",
    "scale_rates",
]
