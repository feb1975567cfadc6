"""Load a recipe as what its kind says: one that pretrains, fine-tunes, or distils on text or on a task.

Nothing here follows a paper. resolve.py finds the settings, schema.py and its siblings say what may stand in them; they
bring torch along, which a misspelt name need not wait for, so they are imported when the kind is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bertkit.recipe.faults import validate
from bertkit.recipe.resolve import DEFAULT_KIND, kind_of, require_kind, resolve_recipe
from bertkit.recipe.tree import Located

if TYPE_CHECKING:
    from bertkit.finetuning.recipe import FinetuneRecipe
    from bertkit.pretraining.recipe import Recipe


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name or path, one that pretrains, with `KEY=VALUE` overrides applied.

    Raises:
        UsageError: no such recipe, not YAML, a circle of `extends`, one of another kind, or faults in the settings (all
            of them at once).
    """
    tree = resolve_recipe(name, overrides)
    require_kind(tree, name, DEFAULT_KIND)
    from bertkit.pretraining.recipe import Recipe

    return validate(tree, Recipe)


def load_any(name: str, overrides: Sequence[str] = ()) -> Recipe | FinetuneRecipe:
    """As `load_recipe`, for a recipe of any kind; one of a task is resolved where it names task and models."""
    tree = resolve_recipe(name, overrides)
    kind = kind_of(tree)
    if kind == "distill":
        return _distillation(tree)
    if kind != "finetune":
        from bertkit.pretraining.recipe import Recipe

        return validate(tree, Recipe)
    from bertkit.finetuning.recipe import FinetuneRecipe, resolved

    recipe = validate(tree, FinetuneRecipe)
    return resolved(recipe) if recipe.task is not None and recipe.model is not None else recipe


def _distillation(tree: Located) -> Recipe | FinetuneRecipe:
    """A recipe that distils: on text where it has an `objective`, else on a task."""
    if tree.child("objective") is not None:
        from bertkit.distillation.text_recipe import DistillTextRecipe

        return validate(tree, DistillTextRecipe)
    from bertkit.distillation.task_recipe import DistillRecipe, is_complete, resolved_distillation

    recipe = validate(tree, DistillRecipe)
    return resolved_distillation(recipe) if is_complete(recipe) else recipe
