"""Short names of the settings that are changed most often, the same for every command that trains.

Not from a paper. `--lr`, `--epochs`, `--batch` and `--max-length`, `--set lr=...` and `--grid lr=...` mean the long
keys, and give an identical recipe. Sibling old_keys.py has the keys of earlier versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from bertkit.recipe.resolve import Override

_SHARED = {
    "lr": "optimisation.schedule.peak",
    "learning_rate": "optimisation.schedule.peak",
    "batch": "optimisation.batch_sequences",
    "batch_sequences": "optimisation.batch_sequences",
    "warmup": "optimisation.schedule.warmup_share",
}
OF_TASKS: Mapping[str, str] = MappingProxyType(
    {
        **_SHARED,
        "epochs": "optimisation.epochs",
        "layer_decay": "optimisation.layer_decay",
        "max_length": "data.max_length",
    }
)
"""For a recipe on a task."""
OF_TEXT: Mapping[str, str] = MappingProxyType({**_SHARED, "max_length": "data.sequence_length"})
"""For a recipe on text."""


def expand_key_aliases(overrides: Sequence[Override], keys: Mapping[str, str]) -> list[Override]:
    """The overrides with `lr` replaced by `optimisation.schedule.peak`, and so on."""
    return [replace(each, key=keys.get(each.key, each.key)) for each in overrides]
