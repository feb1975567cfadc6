"""Checks that a model can grow as the stages of a recipe have it, before any text is read.

Gong et al. 2019, ICML, section 4 (models/conversion/convert.py has the rule). Sibling rates.py checks learning rates
likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bertkit.errors import UsageError
from bertkit.models.conversion.convert import grown
from bertkit.objectives.base import CompanionObjective
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.stages import Stage


def check_growth(stages: Sequence[Stage]) -> None:
    """Reject stages whose models do not grow out of each other; the models are built without weights for this check.

    Raises:
        UsageError: a model cannot become that of the next stage, or has a companion, which keeps its size.
    """
    first, *later = [stage.recipe.model for stage in stages]
    if all(config == first for config in later):
        return
    objectives = [objective for stage in stages for objective in stage.recipe.objectives]
    leader = next((each for each in objectives if isinstance(each, CompanionObjective)), None)
    if leader is not None:
        raise UsageError(
            f"optimisation.stages: the model cannot grow together with objective.{leader.term}, whose"
            f" {leader.companion.replace('_', ' ')} would keep its size; leave model.num_hidden_layers out of the"
            " stages"
        )
    with torch.device("meta"):
        model = pretraining_model(first, objectives, stages[0].recipe.tokenizer.vocab_size)
        for config in later:
            model = grown(model, config)
