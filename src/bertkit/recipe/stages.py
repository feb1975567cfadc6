"""The stages of a run: the same recipe with some settings changed for a share of the steps.

Devlin et al. 2019, BERT, appendix A.2, is the model of it: 90% of the steps at 128 tokens, the rest at 512. Each stage
is checked like a recipe of its own before the first step is taken.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from bertkit.errors import UsageError
from bertkit.recipe.load import with_overrides
from bertkit.recipe.schema import Recipe

_MAY_CHANGE = ("data", "objective")


@dataclass(frozen=True)
class Stage:
    """A stretch of steps and the recipe that holds there.

    Attributes:
        number: from 0.
        first_step, end_step: the steps that it takes, the end not included.
        recipe: with the stage's settings in place.
    """

    number: int
    first_step: int
    end_step: int
    recipe: Recipe


def stages_of(recipe: Recipe) -> list[Stage]:
    """The stages of a recipe in order; one that spans the run where it names none.

    Raises:
        UsageError: if a stage changes what cannot change inside a run, or makes the recipe faulty.
    """
    stages: list[Stage] = []
    first = 0
    configs = recipe.optimisation.stages
    for number, end in enumerate(recipe.optimisation.stage_ends()):
        changes = configs[number].set if configs else {}
        for key in changes:
            if key.partition(".")[0] not in _MAY_CHANGE:
                raise UsageError(
                    f"optimisation.stages.{number}.set: {key} cannot change inside a run;"
                    f" only settings of {' and '.join(_MAY_CHANGE)} can"
                )
        overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        stages.append(Stage(number, first, end, with_overrides(recipe, overrides)))
        first = end
    return stages
