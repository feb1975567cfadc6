"""A recipe that distils: on text where it has an `objective`, else on a task.

Nothing here follows a paper. Siblings text_recipe.py and task_recipe.py hold the two schemas.
"""

from __future__ import annotations

from bertkit.distillation.task_recipe import DistillRecipe, is_complete, resolved_distillation
from bertkit.distillation.text_recipe import DistillTextRecipe
from bertkit.recipe.errors import validate
from bertkit.recipe.tree import Located


def from_tree(tree: Located) -> DistillTextRecipe | DistillRecipe:
    """The recipe of resolved settings; one on a task is completed where it names task, teacher and student.

    Raises:
        UsageError: faults in the settings, all of them at once.
    """
    if tree.child("objective") is not None:
        return validate(tree, DistillTextRecipe)
    recipe = validate(tree, DistillRecipe)
    return resolved_distillation(recipe) if is_complete(recipe) else recipe
