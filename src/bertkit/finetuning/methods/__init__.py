"""The methods of fine-tuning, by their name in recipes; a new one is one file and one entry."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bertkit.compression.pruning import Pruned
from bertkit.compression.q8bert import Q8Bert
from bertkit.compression.qbert import QBert
from bertkit.compression.theseus import Theseus
from bertkit.finetuning.methods.features import FeatureBased
from bertkit.finetuning.methods.freelb import FreeLb
from bertkit.finetuning.methods.frozen import Frozen, GradualUnfreezing
from bertkit.finetuning.methods.lora import Lora
from bertkit.finetuning.methods.setfit import Setfit
from bertkit.training.method import Full

AnyMethod = Annotated[
    Full | Frozen | GradualUnfreezing | Lora | FeatureBased | FreeLb | Pruned | Theseus | Q8Bert | QBert | Setfit,
    Field(discriminator="name"),
]
