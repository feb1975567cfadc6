"""A study whose recipes are all loaded and checked: its runs, their steps, and the hashes of its inputs.

Sibling runner.py executes the runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bertkit.data.shards import TokenShards, is_shards
from bertkit.files import joint_sha256
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.run import open_shards
from bertkit.progress import Progress
from bertkit.recipe.hashing import what_hash
from bertkit.run.finished import INITIAL_FINGERPRINT, MEASURES_FINGERPRINT
from bertkit.study.budget import StepCost, cost_key, step_cost
from bertkit.study.check import check_measurable, check_measures, check_recipes
from bertkit.study.settings import Study
from bertkit.study.study_runs import (
    StudyRun,
    candidates_of,
    pretrain_arguments,
    pretrain_recipe,
    scored_of,
    settings_of,
)
from bertkit.text.sources import hub_commits


@dataclass(frozen=True)
class PlannedStudy:
    """A study with all its recipes loaded and checked.

    Attributes:
        study: resolved.
        cache: the cache root.
        offline: do not use the network.
    """

    study: Study
    cache: Path
    offline: bool
    _opened: dict[str, TokenShards] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def recipes(self) -> dict[str, list[tuple[dict[str, Any], Recipe]]]:
        """Each arm's settings with the resulting recipe, at the recipe's own steps and the first seed."""
        return {
            arm: [(setting, self.recipe(StudyRun(arm, setting, self.study.seeds[0]), None)) for setting in settings]
            for arm in self.study.arms
            for settings in [settings_of(self.study, arm)]
        }

    def recipe(self, study_run: StudyRun, steps: int | None) -> Recipe:
        """The recipe of one run."""
        return pretrain_recipe(
            pretrain_arguments(self.study, study_run, steps, cache=self.cache, offline=self.offline), study_run.arm
        )

    @cached_property
    def measures_sha256(self) -> str | None:
        """The hash of the data of all measures, which are checked; see `check_measures`."""
        return check_measures(self.study, offline=self.offline)

    def check(self) -> None:
        """Check recipes, measures and data before the first step.

        Raises:
            UsageError, DataError: see check.py.
        """
        check_recipes(self.study, self.recipes)
        check_measurable(self.study, {arm: own[0][1] for arm, own in self.recipes.items()})
        _ = self.measures_sha256

    def runs(self, chosen: Mapping[str, Mapping[str, Any]] | None = None) -> list[StudyRun]:
        """All runs; scored runs use the chosen settings, or an arm's first setting if nothing is chosen yet.

        Args:
            chosen: settings of each arm that has a choice.
        """
        arms = list(self.study.arms)
        settings = {arm: own[0][0] for arm, own in self.recipes.items()} if chosen is None else chosen
        candidates = [study_run for arm in arms for study_run in candidates_of(self.study, arm)]
        # Seed by seed, so that an interrupted study has scores for every arm.
        scored = [
            scored_of(self.study, arm, settings[arm])[n]
            for n in range(len(self.study.seeds))
            for arm in arms
            if arm in settings
        ]
        return [*candidates, *scored]

    @property
    def reads_shards(self) -> bool:
        """Whether all text is token shards, which need not be tokenised first."""
        recipes = [recipe for own in self.recipes.values() for _, recipe in own]
        return all(recipe.data.sources and all(map(is_shards, recipe.data.sources)) for recipe in recipes)

    def fingerprints(self, progress: Progress) -> dict[str, str | None]:
        """Hashes of the text of all arms, of all recipes that may run, of the models that these start from, and of what
        the measures read."""
        recipes = [recipe for own in self.recipes.values() for _, recipe in own]
        corpora = {_text_key(recipe): self._shards(recipe, progress).fingerprint for recipe in recipes}
        found: dict[str, str | None] = {
            "data": joint_sha256(corpora.values()),
            "recipe": joint_sha256(map(what_hash, recipes)),
        }
        started = {(recipe.init, recipe.init_decoder): recipe for recipe in recipes if recipe.init is not None}
        if started:
            arguments = PretrainArguments(cache=self.cache, offline=self.offline)
            hashes = [each for recipe in started.values() for each in arguments.fingerprints(recipe).values()]
            found[INITIAL_FINGERPRINT] = joint_sha256(filter(None, hashes))
        measures = self.measures_sha256
        return found if measures is None else found | {MEASURES_FINGERPRINT: measures}

    def commits(self) -> dict[str, str]:
        """The commits of the Hub's data sets that the runs read as text, by the name and branch asked for."""
        recipes = [recipe for own in self.recipes.values() for _, recipe in own]
        return hub_commits([each for recipe in recipes for each in recipe.data.all_sources], offline=self.offline)

    def _shards(self, recipe: Recipe, progress: Progress) -> TokenShards:
        """The shards of a recipe's text, opened once."""
        key = _text_key(recipe)
        if key not in self._opened:
            self._opened[key] = open_shards(recipe, cache=self.cache, offline=self.offline, progress=progress)
        return self._opened[key]

    def costs(self, known: Mapping[str, Any], progress: Progress) -> dict[str, dict[str, float]]:
        """The cost of a step of every recipe, by its `cost_key`; measured if not known."""
        found = dict(known)
        recipes = {cost_key(recipe): recipe for own in self.recipes.values() for _, recipe in own}
        with progress("cost of a step", len(recipes), "settings") as meter:
            for done, (key, recipe) in enumerate(recipes.items(), start=1):
                if key not in found:
                    found[key] = vars(step_cost(recipe, self._shards(recipe, progress), cache=self.cache))
                meter.update(done)
        return found

    def steps(self, study_run: StudyRun, costs: Mapping[str, Any]) -> int:
        """Number of updates of one run."""
        recipe = next(recipe for setting, recipe in self.recipes[study_run.arm] if setting == dict(study_run.setting))
        return StepCost(**costs[cost_key(recipe)]).steps(self.study.budget, study_run.share)


def _text_key(recipe: Recipe) -> str:
    """A key shared by recipes with the same shards."""
    data = recipe.data.model_dump(mode="json", include={"sources", "languages", "reading", "language_smoothing"})
    return json.dumps([data, recipe.tokenizer.model_dump(mode="json")], sort_keys=True)
