"""The methods of fine-tuning, by the name that a recipe gives them; a new one is one file and one entry."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bertkit.training.methods.base import Full, Method, Scratch, TrainingData, depth_below_head, scale_rates
from bertkit.training.methods.features import FeatureBased
from bertkit.training.methods.freelb import FreeLb
from bertkit.training.methods.frozen import Frozen, GradualUnfreezing
from bertkit.training.methods.lora import Lora
from bertkit.training.methods.pruned import Pruned
from bertkit.training.methods.q8bert import Q8Bert
from bertkit.training.methods.qbert import QBert
from bertkit.training.methods.theseus import Theseus

AnyMethod = Annotated[
    Full | Frozen | GradualUnfreezing | Lora | FeatureBased | FreeLb | Pruned | Theseus | Q8Bert | QBert,
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
    "Pruned",
    "Q8Bert",
    "QBert",
    "Scratch",
    "Theseus",
    "TrainingData",
    "depth_below_head",
    "scale_rates",
]
