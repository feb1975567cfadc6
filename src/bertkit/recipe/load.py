"""Load a recipe of any kind: what pretrains, fine-tunes or distils is known by the capability itself.

Nothing here follows a paper. Sibling resolve.py finds the settings; the schema of each kind lives with its capability,
above this package, and brings torch along, which a misspelt name need not wait for. So each is named here and imported
when the kind is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from bertkit.recipe.resolve import DEFAULT_KIND, Override, kind_of, resolve_recipe

_CAPABILITIES = {
    "pretrain": "bertkit.pretraining.recipe",
    "finetune": "bertkit.finetuning.recipe",
    "distill": "bertkit.distillation.recipe",
}
"""The module of each kind of recipe, whose `from_tree` makes the recipe of resolved settings."""


def load_any(name: str, overrides: Sequence[Override] = ()) -> Any:
    """The recipe of that name or path, of any kind; one on a task is completed where it names task and models.

    Raises:
        UsageError: no such recipe, or faults in the settings (all of them at once).
    """
    tree = resolve_recipe(name, overrides)
    module = _CAPABILITIES.get(kind_of(tree), _CAPABILITIES[DEFAULT_KIND])
    return import_module(module).from_tree(tree)
