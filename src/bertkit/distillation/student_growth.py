"""Which students may grow between the stages of a recipe: only those that no teacher teaches.

Not from a paper. Sibling text_arguments.py checks a recipe with it, the trainers a resumed run.
"""

from __future__ import annotations

from bertkit.distillation.shared_projections import teacher_objectives
from bertkit.distillation.text_recipe import DistillTextRecipe
from bertkit.errors import UsageError
from bertkit.pretraining.growth import check_growth
from bertkit.pretraining.stages import stages_of


def check_student_growth(recipe: DistillTextRecipe) -> None:
    """Raise UsageError if the student grows, unless it is the control of one with its own vocabulary."""
    stages = stages_of(recipe)
    if len({stage.recipe.model for stage in stages}) == 1:
        return
    if teacher_objectives([objective for stage in stages for objective in stage.recipe.objectives]):
        raise UsageError(
            "optimisation.stages: a student cannot grow while its teacher is trained with it; leave"
            " model.num_hidden_layers out of the stages"
        )
    if not recipe.has_own_vocabulary:
        raise UsageError(
            "optimisation.stages: a student cannot grow during distillation, because the layers to compare would"
            " change; leave model.num_hidden_layers out of the stages"
        )
    check_growth(stages)
