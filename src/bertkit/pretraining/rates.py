"""Per-parameter learning-rate factors of a recipe, checked before any text is read.

Not from a paper. Parameter groups are resolved in training/rates.py, width rules in width_transfer.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.recipe import PretrainingOptimisation
from bertkit.pretraining.stages import Stage
from bertkit.pretraining.width_transfer import WidthTransfer
from bertkit.training.rates import group_rates


def stage_rates(names: Sequence[str], stage: Stage, *, stages: int) -> dict[str, float]:
    """The factor of each parameter's learning rate in a stage, from `optimisation.groups`.

    Args:
        names: of all parameters.
        stage: one of the run's stages.
        stages: how many stages the run has.

    Raises:
        UsageError: a group names no parameter of the model.
    """
    try:
        return group_rates(names, stage.recipe.optimisation.groups)
    except UsageError as error:
        where = f"stage {stage.number + 1} of {stages}: " if stages > 1 else ""
        raise UsageError(f"{where}{error}") from None


def width_transfer(model: HeadedModel, optimisation: PretrainingOptimisation) -> WidthTransfer | None:
    """The factors of `optimisation.tuned_width`; None without it.

    Raises:
        UsageError: no rule for the model is known.
    """
    if optimisation.tuned_width is None:
        return None
    return WidthTransfer.of(model, optimisation.optimizer, optimisation.tuned_width)


def check_rates(stages: Sequence[Stage]) -> None:
    """Reject groups or a `tuned_width` that do not fit the model, which is built without weights for this check.

    Args:
        stages: all stages of a run; an initial model has the same parameters once it is loaded.

    Raises:
        UsageError: a group names no parameter, or no rule for the width is known.
    """
    whole = stages[0].recipe
    if whole.optimisation.tuned_width is None and not any(stage.recipe.optimisation.groups for stage in stages):
        return
    objectives = [objective for stage in stages for objective in stage.recipe.objectives]
    for stage in stages:
        with torch.device("meta"):
            model = pretraining_model(stage.recipe.model, objectives, whole.tokenizer.vocab_size)
        width_transfer(model, whole.optimisation)
        stage_rates([name for name, _ in model.named_parameters()], stage, stages=len(stages))
