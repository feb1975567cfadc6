"""The command line of pretraining and its recipe, which is resolved only here.

Not from a paper (contract: `pretrain`). Distillation on text has more options (distillation/text_arguments.py); sibling
run.py trains. A file that affects the result is recorded with the hash of its content: if the file changes, so does
the hash of the recipe, and a resume names the key.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from bertkit.data.language_stream import training_and_held_out
from bertkit.data.shards import TokenShards
from bertkit.errors import UsageError
from bertkit.files import sha256_of
from bertkit.models.conversion.convert import check_same_weights, converted_config
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert_gpt2 import BertGpt2Config
from bertkit.models.files.hub import find_model, read_config, refuse_quantised
from bertkit.models.files.model_files import weights_hash
from bertkit.models.registry import AnyEncoderConfig
from bertkit.pretraining.growth import check_growth
from bertkit.pretraining.initial_model import decoder_config
from bertkit.pretraining.rates import check_rates
from bertkit.pretraining.recipe import INIT_TO_BE_GIVEN, Recipe, load_recipe
from bertkit.pretraining.stages import check_limits, parts_of, stages_of
from bertkit.pretraining.trainer import Pretrainer
from bertkit.recipe.errors import validate
from bertkit.recipe.key_aliases import OF_TEXT, expand_key_aliases
from bertkit.recipe.resolve import Override, load_as, overrides_of, resolve_recipe, with_overrides
from bertkit.recipe.tree import Located
from bertkit.recipe.unread import Part
from bertkit.run.directory import RECIPE, RunDirectory
from bertkit.settings import Settings
from bertkit.stores.url import has_scheme
from bertkit.training.batch_ramp import updates_for
from bertkit.training.run import RunArguments

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)

log = logging.getLogger(__name__)

_ADDING = {"tokenizer.add_tokens", "tokenizer.added_frequency"}
"""Keys that modify the initial model's tokenizer instead of requesting another one."""
_FILE, _FILE_HASH = "lexicon", "lexicon_sha256"
"""The key of a file, and the key of its content's hash in the same mapping."""


@dataclass(frozen=True)
class PretrainArguments(RunArguments[Recipe]):
    """The command line of pretraining, or of distillation on text.

    Attributes:
        sources: text instead of the recipe's; empty: the recipe's own.
        max_steps: end after this many updates; the schedule is shortened accordingly.
        init: a model to start from.
    """

    sources: Sequence[str] = ()
    max_steps: int | None = None
    init: str | None = None

    schema: ClassVar[type[Recipe]] = Recipe
    """The class of the recipe."""
    kind: ClassVar[str] = "pretrain"

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", expand_key_aliases(self.overrides, OF_TEXT))

    @property
    def named(self) -> str:
        """The recipe's name or path.

        Raises:
            UsageError: no recipe is given.
        """
        if self.recipe is None:
            raise self.unnamed(
                "no recipe given; name one (`bertkit recipes list` shows those included), or --resume RUN"
            )
        return self.recipe

    def requested(self) -> Recipe:
        """The recipe with all changes of the command line.

        Raises:
            UsageError: all errors at once.
            DataError: the initial model is missing, or cannot be trained.
        """
        name = self.named
        # The command line takes precedence over the settings of the initial model.
        recipe = load_recipe(
            name,
            [
                *init_overrides(self),
                *self._given_steps,
                *self.overrides,
                *source_overrides(self.sources),
                *_own_examples(self.overrides, self.sources),
            ],
        )
        if recipe.init == INIT_TO_BE_GIVEN:
            raise UsageError(
                f"init: recipe {recipe.name} starts from a model of your choice; give --init MODEL, a model directory,"
                " a run directory or a Hub id"
            )
        if recipe.init is not None and not recipe.init_tiling:
            check_same_weights(self.initial_model(recipe.init)[1], recipe.model)
        if recipe.init_decoder is not None:
            directory, _ = self.initial_model(recipe.init_decoder)
            recipe = with_overrides(recipe, [Override("init_decoder", _recorded_name(recipe.init_decoder, directory))])
        if (path := recipe.tokenizer.path) is not None and (place := Path(path).expanduser()).exists():
            recipe = with_overrides(recipe, [Override("tokenizer.path", str(place.absolute()))])
        recipe = with_overrides(recipe, _full_paths(recipe))
        recipe = with_max_length(recipe, self.overrides)
        warn_of_stages(recipe, self.overrides)
        recipe = completed(recipe, self.max_steps)
        stages = stages_of(recipe)
        check_growth(stages)
        check_rates(stages)
        return recipe

    @property
    def _given_steps(self) -> list[Override]:
        """Steps given on the command line take precedence over the recipe's passes."""
        given = {override.key for override in self.overrides}
        return [Override("optimisation.passes", None)] if "optimisation.steps" in given else []

    def fingerprints(self, recipe: Recipe) -> dict[str, str | None]:
        """Hashes of the models that a run reads; stored in its record and compared on resume.

        Raises:
            DataError: the initial model is missing, or cannot be trained.
        """
        if recipe.init is None:
            return {"model": None}
        names = {"model": recipe.init, **({"decoder": recipe.init_decoder} if recipe.init_decoder else {})}
        return {kind: weights_hash(self.initial_model(name)[0]) for kind, name in names.items()}

    def parts(self, recipe: Recipe) -> Sequence[Part]:
        return parts_of(recipe)

    def inherited(self, recipe: Recipe) -> Mapping[str, BaseModel]:
        return {} if recipe.init is None else {"model": self.initial_model(recipe.init)[1]}

    def initial_model(self, name: str) -> tuple[Path, EncoderConfig]:
        """The directory and the configuration of the model to start from.

        Raises:
            DataError: the model is missing, or cannot be trained.
        """
        directory = find_model(name, offline=self.offline)
        config, contents = read_config(directory)
        refuse_quantised(directory, contents)
        return directory, config

    def recorded(self, run: RunDirectory) -> Recipe:
        # The recipes of old runs do not contain file hashes.
        return with_file_hashes(load_as(self.schema, str(run.path / RECIPE)))

    def changed(self, recorded: Recipe) -> Recipe:
        given = [*self.overrides, *source_overrides(self.sources)]
        if self.init is not None:
            given.append(Override("init", _recorded_name(self.init, self.initial_model(self.init)[0])))
        wanted = with_max_length(with_overrides(recorded, given), self.overrides)
        longer = "for more, start a new run from its model, with --init RUN"
        _warn_of_fewer_steps(wanted, self.max_steps, longer)
        wanted = shortened(wanted, self.max_steps)
        return with_file_hashes(wanted, recompute=True)

    def trainer(self, recipe: Recipe, shards: TokenShards, run: RunDirectory) -> Pretrainer:
        """The run's trainer."""
        return Pretrainer(fitted(recipe, shards, cache=self.cache), shards, run, cache=self.cache)


def fitted(recipe: Recipe, shards: TokenShards, *, cache: Path) -> Recipe:
    """The recipe with `optimisation.passes` converted to steps for this text.

    Args:
        recipe: resolved.
        shards: the tokenised corpus.
        cache: the cache's root, for epoch plans.

    Raises:
        DataError: there is too little text.
    """
    optimisation = recipe.optimisation
    if optimisation.passes is None:
        return recipe
    training, _ = training_and_held_out(
        recipe.data,
        shards,
        seed=recipe.seed,
        stage=0,
        plans=cache / "plans",
        lanes=recipe.optimisation.batch_sequences,
    )
    samples = optimisation.passes * training.epoch_length(0)
    # Rounding up would make the last batch read beyond the limit.
    at_most = recipe.data.max_epochs is not None and optimisation.passes >= recipe.data.max_epochs
    steps = updates_for(samples, optimisation.batch_sequences, optimisation.batch_ramp, at_most=at_most)
    log.info(
        "%g passes over the text: %s steps of %s sequences%s",
        *(optimisation.passes, f"{steps:,}", f"{optimisation.batch_sequences:,}"),
        f"; --max-steps or optimisation.steps: {optimisation.steps:,}" if steps > optimisation.steps else "",
    )
    return with_steps(recipe, steps)


def with_recorded_held_out(recipe: Recipe, run: RunDirectory) -> Recipe:
    """The recipe of a run with the held-out text it started with; early versions counted only documents."""
    if not run.record["steps"]:
        return recipe
    least = run.record.get("held_out", {}).get("least_tokens", 0)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"held_out_tokens": least})})


def completed(recipe: Recipe, max_steps: int | None) -> Recipe:
    """The recipe with its length and its files' hashes; all stages are checked."""
    _warn_of_fewer_steps(recipe, max_steps, f"for a longer run, --set optimisation.steps={max_steps}")
    recipe = with_file_hashes(shortened(recipe, max_steps))
    stages_of(recipe)
    check_limits(recipe)
    return recipe


def with_max_length(recipe: AnyRecipe, overrides: Sequence[Override]) -> AnyRecipe:
    """The recipe with all stages limited to the sequence length of the command line (`--max-length`)."""
    longest, key = recipe.data.sequence_length, OF_TEXT["max_length"]
    stages = [stage.model_dump(mode="json") for stage in recipe.optimisation.stages]
    longer = [number for number, stage in enumerate(stages, start=1) if _whole(stage["set"].get(key)) > longest]
    if not longer or not any(override.key == key for override in overrides):
        return recipe
    for number in longer:
        own = stages[number - 1]["set"]
        log.info("stage %d of %d reads sequences of %d tokens instead of %d", number, len(stages), longest, own[key])
        own[key] = longest
    return with_overrides(recipe, [Override("optimisation.stages", stages)])


def warn_of_stages(recipe: Recipe, overrides: Sequence[Override]) -> None:
    """Log which settings of the command line apply only to some stages because others set their own."""
    given = {override.key: override.place for override in overrides}
    values = {override.key: override.value for override in overrides}
    stages = recipe.optimisation.stages
    others = [[key for key in stage.set if key in given and stage.set[key] != values[key]] for stage in stages]
    for key in dict.fromkeys(key for keys in others for key in keys):
        own = [str(number) for number, keys in enumerate(others, start=1) if key in keys]
        is_one, which = len(own) == 1, f"{' and '.join(own)} of {len(stages)}"
        log.warning(
            "%s applies where a stage does not set %s itself; %s: drop them with --set optimisation.stages=[]",
            *(given[key].partition("=")[0], key, f"stage {which} does" if is_one else f"stages {which} do"),
        )


def with_file_hashes(recipe: Recipe, *, recompute: bool = False) -> Recipe:
    """The recipe with the content hash of each file that objectives and stages name.

    An unreadable file is reported later, by the code that reads it.

    Args:
        recipe: resolved.
        recompute: replace the hashes that the recipe has; otherwise they are kept.
    """
    data = recipe.model_dump(mode="json")
    found = {"objective": data["objective"], "optimisation.stages": data["optimisation"]["stages"]}
    hashed = {key: _hashed(value, recompute=recompute) for key, value in found.items()}
    return recipe if hashed == found else with_overrides(recipe, overrides_of(hashed))


def _hashed(data: Any, *, recompute: bool) -> Any:
    if isinstance(data, list):
        return [_hashed(item, recompute=recompute) for item in data]
    if not isinstance(data, dict):
        return data
    result = {key: _hashed(value, recompute=recompute) for key, value in data.items()}
    for key, path in data.items():
        section, dot, name = key.rpartition(".")  # a stage's keys are dotted
        hash_key = f"{section}{dot}{_FILE_HASH}"
        if name == _FILE and (recompute or data.get(hash_key) is None):
            result[hash_key] = None
            if path is not None:
                with suppress(OSError):
                    place = Path(path).expanduser()
                    result |= {hash_key: sha256_of(place), key: str(place.absolute())}
    return result


def _warn_of_fewer_steps(recipe: Recipe, max_steps: int | None, longer: str) -> None:
    steps = recipe.optimisation.steps
    if max_steps is not None and max_steps > steps:
        log.warning(
            "--max-steps %s: the run has %s steps (optimisation.steps); %s", f"{max_steps:,}", f"{steps:,}", longer
        )


def shortened(recipe: Recipe, max_steps: int | None) -> Recipe:
    """The recipe with at most this many steps; a message says so."""
    steps = recipe.optimisation.steps
    found = recipe if max_steps is None else with_steps(recipe, max_steps)
    if found.optimisation.steps < steps:
        warmup = found.optimisation.schedule.warmup(found.optimisation.steps)
        log.info("%s steps instead of %s, warm-up %s", f"{max_steps:,}", f"{steps:,}", f"{warmup:,}")
    return found


def with_steps(recipe: Recipe, max_steps: int) -> Recipe:
    """The recipe with at most this many steps; warm-up and stages shrink proportionally."""
    optimisation = recipe.optimisation
    if max_steps >= optimisation.steps:
        return recipe

    def shorter_schedule(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        names = (optimisation.schedule.name, settings.get(f"{prefix}name"))
        least = {"warmup_steps": int("inverse-sqrt" in names and max_steps > 1), "total_steps": 1}
        shorter = {
            f"{prefix}{key}": max(lowest, settings[f"{prefix}{key}"] * max_steps // optimisation.steps)
            for key, lowest in least.items()
            if _whole(settings.get(f"{prefix}{key}"))  # anything else is reported by validation
        }
        return {**settings, **shorter}

    schedule = shorter_schedule(optimisation.schedule.model_dump(mode="json"))
    stages = [stage.model_dump(mode="json") for stage in optimisation.stages]
    for stage in stages:
        stage["set"] = shorter_schedule(stage["set"], "optimisation.schedule.")
        if isinstance(own := stage["set"].get("optimisation.schedule"), dict):
            stage["set"]["optimisation.schedule"] = shorter_schedule(own)
    changed = {"steps": max_steps, "schedule": schedule, "stages": stages}
    return with_overrides(recipe, [Override(f"optimisation.{key}", value) for key, value in changed.items()])


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


class _ModelNoun(Settings):
    """Only the `model` section of a recipe; all other keys are ignored."""

    model: AnyEncoderConfig


def init_overrides(arguments: PretrainArguments) -> list[Override]:
    """Overrides that make a recipe start from the model of `--init`: its sizes and its tokenizer.

    The recipe's tokenizer is kept if the command line changes it, or if a recipe with `init: '?'` has one; the model
    then gets a new vocabulary. The sequence length of a recipe with `init: '?'` is limited to the model's maximum.

    Raises:
        UsageError: the recipe is for a family that the model cannot be converted to.
        DataError: the model is missing, or cannot be trained.
    """
    if arguments.init is None:
        return []
    directory, config = arguments.initial_model(arguments.init)
    others = [override for override in arguments.overrides if override.key not in _ADDING]
    tree = resolve_recipe(arguments.named, others)
    given, model = tree.child("init"), tree.child("model")
    tiling = tree.child("init_tiling")
    keeps_sizes = tiling is not None and tiling.value is True
    any_model = given is not None and given.value == INIT_TO_BE_GIVEN and not keeps_sizes
    if not any_model and not keeps_sizes and model is not None:
        config = converted_config(config, validate(Located({"model": model}, tree.place), _ModelNoun).model)
        decoder = tree.child("init_decoder")
        if decoder is not None and isinstance(decoder.value, str) and isinstance(config, BertGpt2Config):
            _, found = arguments.initial_model(decoder.value)
            config = config.with_decoder(decoder_config(decoder.value, found))
    name = _recorded_name(arguments.init, directory)
    overrides = overrides_of({"init": name} if keeps_sizes else {"init": name, "model": config.model_dump(mode="json")})
    changed = any(override.key.partition(".")[0] == "tokenizer" for override in others)
    if not changed and not (any_model and tree.child("tokenizer") is not None):
        overrides.append(Override("tokenizer", {"path": name}))
    if any_model:
        has_length = any(override.key == OF_TEXT["max_length"] for override in others)
        overrides += [] if has_length else _shorter_than(config.max_tokens, tree)  # a longer one is refused
    return overrides


def _recorded_name(name: str, directory: Path) -> str:
    """A model's name in the record of a run: the full path if it is on this disk."""
    return str(directory.resolve()) if Path(name).exists() else name


def _shorter_than(most: int, tree: Located) -> list[Override]:
    """An override of the recipe's sequence length if it exceeds the initial model's maximum."""
    data = tree.child("data")
    length = data.child("sequence_length") if data is not None else None
    if length is None or not isinstance(length.value, int) or length.value <= most:
        return []
    log.info("sequences of %d tokens instead of %d: the maximum of the initial model", most, length.value)
    return [Override(OF_TEXT["max_length"], most)]


def source_overrides(sources: Sequence[str]) -> list[Override]:
    """Overrides that replace the recipe's text, with full paths so that the recorded recipe works from anywhere."""
    if not sources:
        return []
    return overrides_of({"data.sources": list(map(_full_path, sources)), "data.languages": {}})


def _own_examples(overrides: Sequence[Override], sources: Sequence[str]) -> list[Override]:
    """Texts to fill in that a recipe has for its own text are not for another one."""
    given = any(override.key == "engine.examples" for override in overrides)
    return [] if given or not sources else [Override("engine.examples", [])]


def _full_path(source: str) -> str:
    if source.startswith(("hub:", "builtin:")) or has_scheme(source):
        return source
    return str(Path(source).expanduser().absolute())


def _full_paths(recipe: Recipe) -> list[Override]:
    """Overrides that give the recipe's own sources full paths, likewise."""
    data = recipe.data
    if data.languages:
        languages = {name: list(map(_full_path, own)) for name, own in data.languages.items()}
        return overrides_of({"data.languages": languages}) if languages != dict(data.languages) else []
    sources = list(map(_full_path, data.sources))
    return overrides_of({"data.sources": sources}) if sources != list(data.sources) else []
