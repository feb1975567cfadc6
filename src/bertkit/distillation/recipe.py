"""Recipes of kind `distill`: on text or on a task, with a teacher and a student, or a table of token vectors.

Hinton et al. 2015, arXiv:1503.02531. A recipe with an `objective` distils on text: a pretraining recipe whose list of
objectives includes distillation terms (DistilBERT, Sanh et al. 2019, arXiv:1910.01108). One with a section `static`
makes a table of token vectors and trains nothing (static_recipe.py). Any other distils on a task: a fine-tuning recipe
with a list `distillation`, in which the labels are one term.

    kind: distill                                     kind: distill
    teacher: google-bert/bert-base-uncased            teacher: "?"
    student: {layers: [0, 2, 4, 7, 9, 11]}            student: {layers: uniform, number: 3}
    objective:                                        distillation:
    - soft_targets: {weight: 5, temperature: 2}       - labels: {weight: 0.5}
    - masked_lm: {weight: 2}                          - soft_targets: {weight: 0.5, temperature: 4}
"""

from __future__ import annotations

from bertkit.distillation.static_recipe import SECTION, StaticRecipe
from bertkit.distillation.task_recipe import DistillRecipe, resolved_distillation
from bertkit.distillation.text_recipe import DistillTextRecipe
from bertkit.recipe.errors import validate
from bertkit.recipe.tree import Located


def from_tree(tree: Located) -> DistillTextRecipe | DistillRecipe | StaticRecipe:
    """The recipe for resolved settings; one on a task is completed if it names task, teacher and student.

    Raises:
        UsageError: errors in the settings, all of them at once.
    """
    if tree.child("objective") is not None:
        return validate(tree, DistillTextRecipe)
    if tree.child(SECTION) is not None:
        return validate(tree, StaticRecipe)
    recipe = validate(tree, DistillRecipe)
    return resolved_distillation(recipe) if recipe.is_complete else recipe
