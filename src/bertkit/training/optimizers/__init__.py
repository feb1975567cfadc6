"""Optimisers: torch's own if it has one, configured as in the papers' code; one file per rule.

A recipe chooses by `optimizer.name`; the default is adamw. `base.py` contains what all share.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import Discriminator, Tag

from bertkit.training.optimizers.adafactor import AdafactorConfig
from bertkit.training.optimizers.adagrad import AdagradConfig
from bertkit.training.optimizers.adam import AdamConfig, AdamWConfig
from bertkit.training.optimizers.base import OptimizerConfig, decay_groups, optimizer_tensors, restore_optimizer
from bertkit.training.optimizers.lamb import LambConfig
from bertkit.training.optimizers.muon import MuonConfig
from bertkit.training.optimizers.stable_adamw import StableAdamWConfig


def _name(value: Any) -> Any:
    """The tag of a value; adamw rejects anything that is not a mapping."""
    if value is None:
        return "none"
    return value.get("name", "adamw") if isinstance(value, dict) else getattr(value, "name", "adamw")


_Kinds = (
    Annotated[AdamWConfig, Tag("adamw")]
    | Annotated[AdamConfig, Tag("adam")]
    | Annotated[LambConfig, Tag("lamb")]
    | Annotated[AdafactorConfig, Tag("adafactor")]
    | Annotated[AdagradConfig, Tag("adagrad")]
    | Annotated[MuonConfig, Tag("muon")]
    | Annotated[StableAdamWConfig, Tag("stable-adamw")]
)
_NAMES = [get_args(kind)[1].tag for kind in get_args(_Kinds)]
# A plain key as discriminator would be mandatory. The error is the same as for such a key.
_by_name = Discriminator(
    _name,
    custom_error_type="union_tag_invalid",
    custom_error_context={"discriminator": "'name'", "tag": "", "expected_tags": ", ".join(map(repr, _NAMES))},
)
AnyOptimizerConfig = Annotated[_Kinds, _by_name]
OptimizerOrNone = Annotated[_Kinds | Annotated[None, Tag("none")], _by_name]

__all__ = [
    "AdafactorConfig",
    "AdagradConfig",
    "AdamConfig",
    "AdamWConfig",
    "AnyOptimizerConfig",
    "LambConfig",
    "MuonConfig",
    "OptimizerConfig",
    "OptimizerOrNone",
    "StableAdamWConfig",
    "decay_groups",
    "optimizer_tensors",
    "restore_optimizer",
]
