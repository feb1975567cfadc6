"""The runs of a study: candidates for each arm's settings, then each arm with its chosen settings for every seed.

Each is an ordinary pretraining run with the study's recipe and the arm's settings.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.errors import UsageError
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.recipe import Recipe
from bertkit.recipe.resolve import Override
from bertkit.study.settings import Study


@dataclass(frozen=True)
class StudyRun:
    """One run of a study.

    Attributes:
        arm: its name.
        setting: value of each key that the study tunes.
        seed: seed of the run.
        share: fraction of the budget to spend.
        candidate: its number among the arm's candidates; None for a scored run.
    """

    arm: str
    setting: Mapping[str, Any]
    seed: int
    share: float = 1.0
    candidate: int | None = None

    @property
    def name(self) -> str:
        """Name of the run's directories."""
        return f"{self.arm}-seed={self.seed}" if self.candidate is None else f"{self.arm}-candidate={self.candidate}"

    @property
    def shown(self) -> str:
        """Arm, chosen settings and seed, for log messages."""
        return f"{self.arm}, {shown_setting(self.setting)}seed {self.seed}"


def shown_setting(setting: Mapping[str, Any]) -> str:
    """`peak 0.0015, ` for each key of a setting."""
    return "".join(f"{short_key(key)} {value}, " for key, value in setting.items())


def short_key(key: str) -> str:
    """The last word of a dotted key."""
    return key.rpartition(".")[2]


def settings_of(study: Study, arm: str) -> list[dict[str, Any]]:
    """The candidate settings of an arm; a single empty one if nothing is chosen."""
    grid = {**({} if study.choose is None else study.choose.grid), **study.arms[arm].grid}
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def candidates_of(study: Study, arm: str) -> list[StudyRun]:
    """One short run per candidate setting of an arm; none if nothing is chosen."""
    if study.choose is None:
        return []
    share = study.choose.budget_share * study.arms[arm].budget_share
    return [
        StudyRun(arm, setting, study.choose.seed, share, number)
        for number, setting in enumerate(settings_of(study, arm), start=1)
    ]


def scored_of(study: Study, arm: str, setting: Mapping[str, Any]) -> list[StudyRun]:
    """One full run per seed."""
    return [StudyRun(arm, setting, seed, study.arms[arm].budget_share) for seed in study.seeds]


def pretrain_arguments(
    study: Study, study_run: StudyRun, steps: int | None, *, cache: Path, offline: bool, more: Sequence[Override] = ()
) -> PretrainArguments:
    """The pretraining arguments of one run of a study.

    Args:
        study: resolved.
        study_run: one of its runs.
        steps: steps of the run; None for the recipe's own.
        cache: the cache root.
        offline: do not use the network.
        more: additional overrides.
    """
    arm = study.arms[study_run.arm]
    overrides = [
        *(Override(key, value, f"set.{key}") for key, value in study.set.items()),
        *(Override(key, value, f"arms.{study_run.arm}.set.{key}") for key, value in arm.set.items()),
        *(Override(key, value, f"a grid of arms.{study_run.arm}") for key, value in study_run.setting.items()),
        Override("seed", study_run.seed, "seeds"),
        Override("name", re.sub(r"[^\w.+-]", "-", f"{study.name}-{study_run.name}"), "the study"),
        *more,
    ]
    if steps is not None:
        overrides.append(Override("optimisation.steps", steps, "budget"))
    return PretrainArguments(arm.recipe or study.recipe, overrides, cache=cache, offline=offline)


def pretrain_recipe(arguments: PretrainArguments, arm: str) -> Recipe:
    """The recipe of one run of a study.

    Raises:
        UsageError: errors in it, all reported at once, prefixed with the arm's name.
        DataError: its initial model is missing.
    """
    try:
        return arguments.requested()
    except UsageError as error:
        raise UsageError(f"arms.{arm}: {error}") from error
