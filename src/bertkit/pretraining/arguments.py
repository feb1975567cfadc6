"""The command line of pretraining, the recipe that it makes, and what trains it.

Own design (contract: `pretrain`). Distillation on text has more options (distillation/text_arguments.py); sibling
run.py carries it out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bertkit.data.shards import TokenShards
from bertkit.errors import UsageError
from bertkit.models.conversion import converted_config
from bertkit.models.hub import find_model, read_config, refuse_quantised
from bertkit.models.model_files import weights_hash
from bertkit.models.registry import AnyEncoderConfig
from bertkit.pretraining.file_hashes import with_contents
from bertkit.pretraining.recipe import INIT_TO_BE_GIVEN, Recipe, load_recipe
from bertkit.pretraining.stages import stages_of
from bertkit.pretraining.trainer import Pretrainer
from bertkit.recipe.errors import validate
from bertkit.recipe.resolve import Override, load_as, overrides_of, resolve_recipe, with_overrides
from bertkit.recipe.tree import Located
from bertkit.run.directory import RECIPE, RunDirectory
from bertkit.settings import Settings
from bertkit.training.run import RunArguments

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PretrainArguments(RunArguments[Recipe]):
    """The command line of pretraining, or of distillation on text.

    Attributes:
        sources: text in place of the recipe's; empty for the recipe's own.
        max_steps: end after this many updates, the schedule with them.
        init: a model to start from.
    """

    sources: Sequence[str] = ()
    max_steps: int | None = None
    init: str | None = None

    schema: ClassVar[type[Recipe]] = Recipe
    """What a recipe of this kind may hold."""
    kind: ClassVar[str] = "pretrain"

    @property
    def named(self) -> str:
        """The recipe's name or path.

        Raises:
            UsageError: there is none.
        """
        if self.recipe is None:
            raise UsageError("give a RECIPE (`bertkit recipes list` shows those that ship), or --resume RUN")
        return self.recipe

    def requested(self) -> Recipe:
        """The recipe with everything that the command line changes in it.

        Raises:
            UsageError: all errors at once.
            DataError: the initial model is at fault.
        """
        name = self.named
        # The command line takes precedence over the settings of the initial model.
        overrides = [*starting_from(self), *self.overrides]
        overrides += source_overrides(self.sources)
        recipe = load_recipe(name, overrides)
        if recipe.init == INIT_TO_BE_GIVEN:
            raise UsageError(
                f"init: recipe {recipe.name} goes on from a model of yours; give --init MODEL, a model or run directory"
                " or a Hub id"
            )
        return completed(recipe, self.max_steps)

    def fingerprints(self, recipe: Recipe) -> dict[str, str | None]:
        """Hashes of the models that a run reads, which its record keeps and a resume compares.

        Raises:
            DataError: the model to go on from is not there, or cannot be trained.
        """
        return {"model": None if recipe.init is None else _start_hash(find_model(recipe.init, offline=self.offline))}

    def recorded(self, run: RunDirectory) -> Recipe:
        # A run of before there were hashes of files has none to compare with.
        return with_contents(load_as(self.schema, str(run.path / RECIPE)))

    def changed(self, recorded: Recipe) -> Recipe:
        wanted = shortened(with_overrides(recorded, list(self.overrides)), self.max_steps)
        return with_contents(wanted, anew=True)

    def trainer(self, recipe: Recipe, shards: TokenShards, run: RunDirectory) -> Pretrainer:
        """What trains the run."""
        return Pretrainer(recipe, shards, run, cache=self.cache)


def _start_hash(directory: Path) -> str:
    """Hash of the weights that a run goes on from.

    Raises:
        DataError: it cannot be trained.
    """
    _, contents = read_config(directory)
    refuse_quantised(directory, contents)
    return weights_hash(directory)


def completed(recipe: Recipe, max_steps: int | None) -> Recipe:
    """The recipe with its length and its files' hashes; every stage is checked before anything is done."""
    recipe = with_contents(shortened(recipe, max_steps))
    stages_of(recipe)
    return recipe


def shortened(recipe: Recipe, max_steps: int | None) -> Recipe:
    """The recipe with at most so many steps; warm-up and stages shrink in proportion."""
    optimisation = recipe.optimisation
    if max_steps is None or max_steps >= optimisation.steps:
        return recipe

    def shorter(settings: dict[str, Any], key: str) -> dict[str, Any]:
        if not settings.get(key):
            return settings
        least = min(1, max_steps - 1) if optimisation.schedule.name == "inverse-sqrt" else 0  # it has no rate without
        return {**settings, key: max(least, settings[key] * max_steps // optimisation.steps)}

    schedule = shorter(optimisation.schedule.model_dump(mode="json"), "warmup_steps")
    stages = [stage.model_dump(mode="json") for stage in optimisation.stages]
    for stage in stages:
        stage["set"] = shorter(stage["set"], "optimisation.schedule.warmup_steps")
        if isinstance(own := stage["set"].get("optimisation.schedule"), dict):
            stage["set"]["optimisation.schedule"] = shorter(own, "warmup_steps")
    warmup = schedule.get("warmup_steps", 0)
    log.info("%d steps in place of %d, warm-up %d", max_steps, optimisation.steps, warmup)
    changed = {"steps": max_steps, "schedule": schedule, "stages": stages}
    return with_overrides(recipe, [Override(f"optimisation.{key}", value) for key, value in changed.items()])


class _ModelNoun(Settings):
    """A recipe of which only the model is of interest."""

    model: AnyEncoderConfig


def starting_from(arguments: PretrainArguments) -> list[Override]:
    """Overrides that make a recipe go on from the model of `--init`: its sizes and its tokenizer.

    The recipe's tokenizer is kept where the command line changes it, and where a recipe that leaves the model to be
    given has one: then the model gets a new vocabulary.

    Raises:
        UsageError: the recipe is for a family that the model cannot be converted to.
        DataError: the model cannot be trained.
    """
    if arguments.init is None:
        return []
    directory = find_model(arguments.init, offline=arguments.offline)
    config, contents = read_config(directory)
    refuse_quantised(directory, contents)
    tree = resolve_recipe(arguments.named, arguments.overrides)
    given, model = tree.child("init"), tree.child("model")
    any_model = given is not None and given.value == INIT_TO_BE_GIVEN
    if not any_model and model is not None:
        config = converted_config(config, validate(Located({"model": model}, tree.place), _ModelNoun).model)
    name = str(directory.resolve()) if Path(arguments.init).exists() else arguments.init
    overrides = overrides_of({"init": name, "model": config.model_dump(mode="json")})
    changed = any(override.key.partition(".")[0] == "tokenizer" for override in arguments.overrides)
    if not changed and not (any_model and tree.child("tokenizer") is not None):
        overrides.append(Override("tokenizer", {"path": name}))
    return overrides


def source_overrides(sources: Sequence[str]) -> list[Override]:
    """Overrides that put text in place of the recipe's; none where there is none."""
    if not sources:
        return []
    return overrides_of({"data.sources": [_absolute(source) for source in sources], "data.languages": {}})


def _absolute(source: str) -> str:
    """A file's or directory's full path, so that the recorded recipe runs from anywhere; other sources as they are."""
    return source if source.startswith(("hub:", "builtin:")) else str(Path(source).expanduser().absolute())
