"""From a command line to a run: which recipe, which corpus, which directory; new, or going on with an old one.

Own design (contract: `pretrain`). Sibling pretrain.py does the work once all this is decided.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from bertkit.data.languages import open_languages
from bertkit.data.prepare import prepare_shards
from bertkit.data.shards import TokenShards, is_shards
from bertkit.errors import DataError, UsageError
from bertkit.jobs.pretraining.pretrain import Pretraining
from bertkit.models.continuing import continuing_config
from bertkit.models.hub import find_model, read_config, refuse_quantised
from bertkit.models.registry import AnyEncoderConfig
from bertkit.models.weight_files import weights_hash
from bertkit.progress import Progress
from bertkit.recipe.contents import with_contents
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.faults import validate
from bertkit.recipe.hashing import require_same_result, what_hash
from bertkit.recipe.load import load_recipe
from bertkit.recipe.resolve import load_as, resolve_recipe, with_overrides
from bertkit.recipe.schema import INIT_TO_BE_GIVEN, Recipe
from bertkit.recipe.stages import stages_of
from bertkit.recipe.tree import Located
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.run.find import run_to_resume
from bertkit.settings import Settings
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer_files import load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PretrainRequest:
    """What the user asked for.

    Attributes:
        recipe: name or path; None to take the resumed run's.
        overrides: KEY=VALUE, on top of the recipe.
        sources: text in place of the recipe's; empty for the recipe's own.
        max_steps: end after this many updates, the schedule with them.
        init: a model to start from.
        resume: a run's name or path, `bertkit.run.NEWEST`, or None for a new run.
        runs_root: where runs lie.
        run_dir: exactly where a new run goes.
        cache: where shards and plans are kept.
        offline: ask no network.
        max_minutes: stop after so long, with a checkpoint.
        command: the command line, for the record.
    """

    recipe: str | None
    overrides: Sequence[str] = ()
    sources: Sequence[str] = ()
    max_steps: int | None = None
    init: str | None = None
    resume: str | None = None
    runs_root: Path = Path("runs")
    run_dir: Path | None = None
    cache: Path = field(default_factory=lambda: Path("~/.cache/bertkit").expanduser())
    offline: bool = False
    max_minutes: float | None = None
    command: Sequence[str] = ()


@dataclass(frozen=True)
class Finished:
    """What came of it: the run and the contents of its results.json."""

    run: RunDirectory
    results: dict[str, Any]


class Launch:
    """From a request to what trains: pretraining's way. Distillation on text has its own, in
    distilling/text.py.

    Attributes:
        request: what the user asked for.
    """

    schema: ClassVar[type[Recipe]] = Recipe
    """What a recipe of this kind may hold."""

    def __init__(self, request: PretrainRequest) -> None:
        self.request = request

    def requested(self) -> Recipe:
        """The recipe with everything that the command line changes in it."""
        return requested_recipe(self.request)

    def fingerprints(self, recipe: Recipe) -> dict[str, str]:
        """Hashes of further models, which the run's record keeps and a resume compares."""
        return {}

    def training(self, recipe: Recipe, shards: TokenShards, run: RunDirectory) -> Pretraining:
        """The run itself."""
        return Pretraining(recipe, shards, run, cache=self.request.cache)


def run_pretraining(
    request: PretrainRequest,
    *,
    progress: Progress,
    begun: Callable[[RunDirectory], None] = lambda run: None,
    launch: Callable[[PretrainRequest], Launch] = Launch,
) -> Finished:
    """Start or resume a run and train it to its end.

    Args:
        request: what the user asked for.
        progress: the display.
        begun: called with the run's directory before the training starts.
        launch: what kind of pretraining.

    Raises:
        UsageError: a faulty recipe, or a resume whose recipe decides on another result.
        DataError: text, model, shards or checkpoints at fault.
        StoppedError, DivergedError: see `Pretraining.train`.
    """
    way = launch(request)
    recipe, run = _resumed(way) if request.resume is not None else (way.requested(), None)
    if run is not None and run.status == "done" and run.results is not None:
        log.info("%s is done already", run.path)
        return Finished(run, run.results)
    start_hash = None if recipe.init is None else _start_hash(find_model(recipe.init, offline=request.offline))
    shards = open_shards(recipe, cache=request.cache, offline=request.offline, progress=progress)
    models = {"model": start_hash, **way.fingerprints(recipe)}
    if run is None:
        run = RunDirectory.create(
            request.runs_root,
            RunIdentity(
                kind=recipe.kind,
                recipe=recipe.name,
                recipe_yaml=dump_recipe(recipe),
                what_hash=what_hash(recipe),
                seed=recipe.seed,
                command=request.command,
                fingerprints={
                    "data": shards.fingerprint,
                    "tokenizer": load_tokenizer(shards.directory).fingerprint,
                    **models,
                },
            ),
            request.run_dir,
        )
    elif run.record["fingerprints"]["data"] != shards.fingerprint:
        raise DataError(
            f"{run.path}: the text has changed since the run began (shards {run.record['fingerprints']['data'][:12]},"
            f" now {shards.fingerprint[:12]}); restore the text, or start a new run without --resume"
        )
    elif changed := [name for name, value in models.items() if run.record["fingerprints"].get(name) != value]:
        raise DataError(
            f"{run.path}: {', '.join(changed)} has changed since the run began; restore it, or start a new run without"
            " --resume"
        )
    log.info("run directory %s", run.path)
    begun(run)
    with run.recording(request.command):
        run.write_environment()
        run.update(shards=str(shards.directory.resolve()))
        training = way.training(recipe, shards, run)
        results = training.train(progress=progress, max_minutes=request.max_minutes)
    return Finished(run, results)


def _start_hash(directory: Path) -> str:
    """Hash of the weights that a run goes on from.

    Raises:
        DataError: it cannot be trained.
    """
    _, contents = read_config(directory)
    refuse_quantised(directory, contents)
    return weights_hash(directory)


def requested_recipe(request: PretrainRequest) -> Recipe:
    """The recipe with everything that the command line changes in it."""
    if request.recipe is None:
        raise UsageError("give a RECIPE (`bertkit recipes list` shows those that ship), or --resume RUN")
    # What is said on the command line goes before what the initial model brings along.
    overrides = [*starting_from(request), *request.overrides]
    overrides += source_overrides(request.sources)
    recipe = load_recipe(request.recipe, overrides)
    if recipe.init == INIT_TO_BE_GIVEN:
        raise UsageError(
            f"init: recipe {recipe.name} goes on from a model of yours; give --init MODEL, a model or run directory or"
            " a Hub id"
        )
    return completed(recipe, request.max_steps)


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
    log.info("%d steps in place of %d, warm-up %d", max_steps, optimisation.steps, schedule["warmup_steps"])
    changed = {"steps": max_steps, "schedule": schedule, "stages": stages}
    return with_overrides(recipe, [f"optimisation.{key}={json.dumps(value)}" for key, value in changed.items()])


def open_shards(recipe: Recipe, *, cache: Path, offline: bool, progress: Progress) -> TokenShards:
    """The recipe's corpus as shards: those given, or those of its text, made now where the cache has none."""
    sources = recipe.data.sources
    if recipe.data.languages:
        languages = open_languages(recipe.data, offline=offline)
        return prepare_shards(languages, recipe.tokenizer, None, cache=cache, offline=offline, progress=progress)
    if len(sources) == 1 and is_shards(sources[0]):
        return TokenShards.open(Path(sources[0]), verify=True)
    corpus = open_corpus(sources, recipe.data.reading, offline=offline)
    return prepare_shards(corpus, recipe.tokenizer, None, cache=cache, offline=offline, progress=progress)


def _resumed(way: Launch) -> tuple[Recipe, RunDirectory]:
    """The run to go on with, and its recipe with the engine of the request.

    Raises:
        UsageError: there is no such run, or the request decides on another result; the differing keys are listed.
    """
    request = way.request
    run = _run_to_resume(way)
    recorded = load_as(way.schema, str(run.path / "recipe.yaml"))
    if request.recipe is None:
        wanted = shortened(with_overrides(recorded, list(request.overrides)), request.max_steps)
        wanted = with_contents(wanted, anew=True)
    else:
        wanted = way.requested()
    # A run of before there were hashes of files has none to compare with.
    require_same_result(with_contents(recorded), wanted, run.path)
    return with_overrides(recorded, [f"engine={json.dumps(wanted.engine.model_dump(mode='json'))}"]), run


def _run_to_resume(way: Launch) -> RunDirectory:
    request = way.request
    assert request.resume is not None

    def fitting(runs: Sequence[RunDirectory]) -> Sequence[RunDirectory]:
        if request.recipe is None:
            return runs
        wanted = way.requested()
        same = [run for run in runs if run.record["what_hash"] == what_hash(wanted)]
        # A run of this recipe under another hash is offered too, so that its differing keys are named.
        return same or [run for run in runs if run.record["recipe"] == wanted.name]

    kind = way.schema.model_fields["kind"].default
    return run_to_resume(request.resume, request.runs_root, kind, run_dir=request.run_dir, fitting=fitting)


class _ModelNoun(Settings):
    """A recipe of which only the model is of interest."""

    model: AnyEncoderConfig


def starting_from(request: PretrainRequest) -> list[str]:
    """Overrides that make a recipe go on from the model of `--init`: its sizes and its tokenizer.

    The recipe's tokenizer is kept where the command line changes it, and where a recipe that leaves the model to be
    given has one: then the model gets a new vocabulary.

    Raises:
        UsageError: the recipe is for a family that the model cannot be converted to.
        DataError: the model cannot be trained.
    """
    if request.init is None:
        return []
    assert request.recipe is not None
    directory = find_model(request.init, offline=request.offline)
    config, contents = read_config(directory)
    refuse_quantised(directory, contents)
    tree = resolve_recipe(request.recipe, request.overrides)
    given, model = tree.child("init"), tree.child("model")
    any_model = given is not None and given.value == INIT_TO_BE_GIVEN
    if not any_model and model is not None:
        config = continuing_config(config, validate(Located({"model": model}, tree.place), _ModelNoun).model)
    name = str(directory.resolve()) if Path(request.init).exists() else request.init
    overrides = [f"init={json.dumps(name)}", f"model={json.dumps(config.model_dump(mode='json'))}"]
    changed = any(override.partition("=")[0].strip().partition(".")[0] == "tokenizer" for override in request.overrides)
    if not changed and not (any_model and tree.child("tokenizer") is not None):
        overrides.append(f"tokenizer={json.dumps({'path': name})}")
    return overrides


def source_overrides(sources: Sequence[str]) -> list[str]:
    """Overrides that put text in place of the recipe's; none where there is none."""
    if not sources:
        return []
    return [f"data.sources={json.dumps([_absolute(source) for source in sources])}", "data.languages={}"]


def _absolute(source: str) -> str:
    """A file's or directory's full path, so that the recorded recipe runs from anywhere; other sources as they are."""
    return source if source.startswith(("hub:", "builtin:")) else str(Path(source).expanduser().absolute())
