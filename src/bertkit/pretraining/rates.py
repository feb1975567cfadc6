"""The factors that a recipe gives the learning rates of its model's parameters, checked before any text is read.

Own design. Which parameters a group names is in training/rates.py, what a width asks for in training/width_transfer.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.recipe import PretrainingOptimisation, Recipe
from bertkit.pretraining.stages import Stage, stages_of
from bertkit.training.rates import group_rates
from bertkit.training.width_transfer import WidthTransfer


def stage_rates(names: Sequence[str], stage: Stage, *, stages: int) -> dict[str, float]:
    """The factor of each parameter's learning rate in a stage, by `optimisation.groups`.

    Args:
        names: of all parameters.
        stage: one of the run's.
        stages: how many the run has.

    Raises:
        UsageError: a group names no parameter of the model.
    """
    try:
        return group_rates(names, stage.recipe.optimisation.groups)
    except UsageError as error:
        raise UsageError(f"stage {stage.number}: {error}" if stages > 1 else str(error)) from None


def width_transfer(model: HeadedModel, optimisation: PretrainingOptimisation) -> WidthTransfer | None:
    """The factors of `optimisation.tuned_width`; None without it.

    Raises:
        UsageError: there is no rule for the model.
    """
    if optimisation.tuned_width is None:
        return None
    return WidthTransfer.of(model, optimisation.optimizer, optimisation.tuned_width)


def check_rates(recipe: Recipe) -> None:
    """Refuse a recipe whose groups or `tuned_width` do not fit its model, which is built without weights for that.

    A run that starts from a model (`init`) may have another; its trainer checks it.

    Raises:
        UsageError: a group names no parameter, or there is no rule for the width.
    """
    stages = stages_of(recipe)
    is_needed = recipe.optimisation.tuned_width is not None or any(s.recipe.optimisation.groups for s in stages)
    if recipe.init is not None or not is_needed:
        return
    objectives = [objective for stage in stages for objective in stage.recipe.objectives]
    for stage in stages:
        with torch.device("meta"):
            model = pretraining_model(stage.recipe.model, objectives, recipe.tokenizer.vocab_size)
        width_transfer(model, recipe.optimisation)
        stage_rates([name for name, _ in model.named_parameters()], stage, stages=len(stages))
