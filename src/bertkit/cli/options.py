"""Options of the command line: generated from settings classes, and those that many commands share.

Nothing here follows a paper; the names are those of the command-line contract. A command is a plain function whose
parameters say what its options are:

    def mlm(
        model: Model = None,
        *,
        settings: Annotated[MlmSettings, spelled(pseudo_sequences="--pseudo N")],
        common: Computing,
    ) -> None: ...

`model` is an option written out. `settings` stands for one option a field of the class, whose name, type, range,
default and help are the field's own; the command gets a checked instance. `common` is a dataclass of `Options`, one a
field, its own before those of the class that it extends. `typer_signature` turns the function into what typer reads.
Nothing heavy is imported here: torch, datasets and the rest wait for the command that needs them.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Union, get_args, get_origin

import typer

from bertkit.cli.console import console, duration, result
from bertkit.errors import UsageError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from bertkit.probing.run import Probed, ProbeRequest
    from bertkit.recipe.resolve import Override
    from bertkit.run.directory import RunDirectory
    from bertkit.settings import Settings

DEFAULT_MODEL = "google-bert/bert-base-uncased"
"""The model where neither the command line nor BERTKIT_MODEL names one."""

COMMON_PANEL = "Options of every command"
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


# Options generated from settings classes


@dataclass(frozen=True)
class Options:
    """Options that belong together. A field is annotated as a parameter of a command is, and has its default."""


@dataclass(frozen=True)
class Spelling:
    """How the options of a settings class are written where the fields' names do not say it.

    Attributes:
        options: `--option METAVAR` of a field; a metavar with a comma (`N,N`) stands for a list in one value.
        without: fields that have no option.
        panel: heading of these options on the help page.
        old: options that have been renamed, each with its new name; still accepted.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    without: Collection[str] = ()
    panel: str | None = None
    old: Mapping[str, str] = field(default_factory=dict)


def spelled(
    *,
    without: Collection[str] = (),
    panel: str | None = None,
    old: Mapping[str, str] | None = None,
    **options: str,
) -> Spelling:
    """`Annotated[PairSettings, spelled(only="--only PATTERN")]`: see `Spelling`."""
    return Spelling(options, without, panel, old or {})


@dataclass(frozen=True)
class FromField:
    """One option whose type, range and help are those of a field of a settings class; None where it is not given.

    Attributes:
        schema: the class that has the field, as `module:Class`; imported when the option is made.
        key: the recipe's dotted key that it overrides; the last part is the field.
        spelling: `--option METAVAR` where the field's name does not say it.
        panel: heading on the help page.
    """

    schema: str
    key: str
    spelling: str | None = None
    panel: str | None = None

    def parameter(self, name: str) -> inspect.Parameter:
        """The option as typer reads it."""
        module, _, kind = self.schema.partition(":")
        leaf = self.key.rpartition(".")[2]
        info = getattr(import_module(module), kind).model_fields[leaf]
        return _SettingOption.of((leaf,), info, self.spelling, self.panel, may_lack=True).parameter(name)


@dataclass(frozen=True)
class _SettingOption:
    """The option of one field of a settings class."""

    path: tuple[str, ...]
    flag: str
    metavar: str
    info: FieldInfo
    kind: Any
    is_list: bool
    bounds: Mapping[str, Any]
    panel: str | None
    may_lack: bool

    @classmethod
    def of(
        cls, path: tuple[str, ...], info: FieldInfo, spelling: str | None, panel: str | None, *, may_lack: bool
    ) -> _SettingOption:
        """The option of a field.

        Args:
            path: the field's name, behind those of the settings that it is nested in.
            info: the field.
            spelling: `--option METAVAR`, else the field's name.
            panel: heading on the help page.
            may_lack: whether it is never required and shows no default.
        """
        flag, _, metavar = (spelling or f"--{path[-1].replace('_', '-')}").partition(" ")
        kind, metadata = _unwrapped(info.annotation, info.metadata)
        is_list = get_origin(kind) in (list, tuple)
        if is_list:
            kind, metadata = _unwrapped(get_args(kind)[0], [])
        bounds = {name: getattr(each, name) for each in metadata for name in ("ge", "gt", "le") if hasattr(each, name)}
        if get_origin(kind) is Literal and not all(isinstance(choice, str) for choice in get_args(kind)):
            kind = Union[int, str]  # noqa: UP007  # read as YAML, such as `auto` beside numbers
        return cls(path, flag, metavar, info, kind, is_list, bounds, panel, may_lack)

    @property
    def in_one_value(self) -> bool:
        """Whether the items of a list are parted by commas in one value."""
        return self.is_list and "," in self.metavar

    @property
    def is_yaml(self) -> bool:
        """Whether its value is of several types, and read as YAML."""
        return _is_union(self.kind)

    def parameter(self, name: str) -> inspect.Parameter:
        """The option as typer reads it."""
        kind: Any = str if self.in_one_value or self.is_yaml else self.kind
        several = self.is_list and not self.in_one_value
        default = None if self.may_lack else self.info.get_default(call_default_factory=True)
        if self.info.is_required() and not self.may_lack:
            default = inspect.Parameter.empty
        elif self.is_list:
            default = ",".join(map(str, default)) if default and self.in_one_value else None
        low = self.bounds.get("ge", self.bounds.get("gt", -1) + 1 if kind is int and "gt" in self.bounds else None)
        ranged = kind in (int, float)
        option = typer.Option(
            self.flag,
            help=(self.info.description or "") + (" Repeatable." if several else ""),
            metavar="" if kind is bool else self.metavar or _METAVARS.get(kind),
            min=low if ranged else None,
            max=self.bounds.get("le") if ranged else None,
            show_default=not (default is None or default is False or default in ("", inspect.Parameter.empty)),
            rich_help_panel=self.panel,
        )
        if several:
            kind = list[kind]
        if default is None:
            kind = kind | None
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )

    def value(self, given: Any) -> Any:
        """What was given, as plain data of the field's type."""
        from bertkit.recipe.tree import plain_scalar

        if self.in_one_value:
            parts = [part.strip() for part in given.split(",")]
            return [part if self.kind is str else plain_scalar(part) for part in parts]
        if self.is_yaml:
            return plain_scalar(given)
        return str(given) if isinstance(given, Path) else given


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _unwrapped(annotation: Any, metadata: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A type without `None` and `Annotated`, and the constraints on its values."""
    constraints = list(metadata)
    if get_origin(annotation) is Annotated:
        annotation, *extra = get_args(annotation)
        constraints += [each for one in extra for each in getattr(one, "metadata", [one])]
    if _is_union(annotation):
        rest = [each for each in get_args(annotation) if each is not type(None)]
        annotation = rest[0] if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007  # of a tuple that is computed
        if len(rest) == 1:
            return _unwrapped(annotation, constraints)
    return annotation, constraints


@dataclass(frozen=True)
class _SettingsOptions:
    """The options of a settings class, and the instance that they make."""

    schema: type[Settings]
    options: Mapping[str, _SettingOption]
    may_lack: bool

    @classmethod
    def of(cls, name: str, schema: type[Settings], spelling: Spelling, *, may_lack: bool) -> _SettingsOptions:
        """The options of the parameter `name`; none of them is required where the settings `may_lack` as a whole."""
        found = {
            f"{name}__{'__'.join(path)}": _SettingOption.of(
                path, info, spelling.options.get(path[-1]), spelling.panel, may_lack=may_lack
            )
            for path, info in _leaves(schema, spelling.without)
        }
        return cls(schema, found, may_lack)

    def instance(self, given: Mapping[str, Any]) -> Settings | None:
        """The settings that were given; None where they may lack and none was.

        Raises:
            UsageError: a value is out of range or some are missing.
        """
        from bertkit.recipe.errors import validate
        from bertkit.recipe.tree import Located

        chosen = [(option, given[name]) for name, option in self.options.items() if given[name] not in (None, [])]
        if self.may_lack:
            if not chosen:
                return None
            flags = [option.flag for option, _ in chosen]
            required = [option.flag for option in self.options.values() if option.info.is_required()]
            missing = [flag for flag in required if flag not in flags]
            if missing:
                raise UsageError(f"{', '.join(flags)}: {' and '.join(missing)} must be given too")
        tree: dict[str, Any] = {}
        for option, value in chosen:
            inner = tree
            for part in option.path[:-1]:
                inner = inner.setdefault(part, {})
            inner[option.path[-1]] = Located.of(option.value(value), option.flag)
        return validate(Located.of(tree, "the options"), self.schema, what="the command line", with_keys=False)


def _leaves(schema: type[Settings], without: Collection[str]) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """The fields of a class; those of settings nested in it in their place."""
    from bertkit.settings import Settings

    for name, info in schema.model_fields.items():
        if name in without:
            continue
        kind, _ = _unwrapped(info.annotation, [])
        if isinstance(kind, type) and issubclass(kind, Settings):
            for path, leaf in _leaves(kind, without):
                yield (name, *path), leaf
        else:
            yield (name,), info


def old_spellings(command: Callable[..., None]) -> dict[str, str]:
    """The renamed options of a command, each with its new name."""
    hints = inspect.get_annotations(command, eval_str=True).values()
    spellings = [each for hint in hints for each in get_args(hint) if isinstance(each, Spelling)]
    return {old: new for spelling in spellings for old, new in spelling.old.items()}


def typer_signature(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: a parameter for each option, all given by name."""
    gatherers: dict[str, Callable[[dict[str, Any]], Any]] = {}
    parameters = list(_spread(inspect.signature(command, eval_str=True).parameters.values(), gatherers))

    @functools.wraps(command)
    def of_single_options(**given: Any) -> None:
        gathered = {name: gather(given) for name, gather in gatherers.items()}
        command(**gathered)

    of_single_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    return of_single_options


def _spread(
    declared: Collection[inspect.Parameter], gatherers: dict[str, Callable[[dict[str, Any]], Any]]
) -> Iterator[inspect.Parameter]:
    """The options of each parameter; `gatherers` gets the function that makes its value of all that was given."""
    for parameter in declared:
        name, kind, metadata, may_lack = _declaration(parameter)
        if isinstance(kind, type) and issubclass(kind, Options):
            inner: dict[str, Callable[[dict[str, Any]], Any]] = {}
            yield from _spread(_parameters_of(kind), inner)
            gatherers[name] = functools.partial(_gathered, kind, inner)
            continue
        gatherers[name] = functools.partial(_single, name)
        if _is_settings(kind):
            spelling = next((each for each in metadata if isinstance(each, Spelling)), Spelling())
            generated = _SettingsOptions.of(name, kind, spelling, may_lack=may_lack)
            gatherers[name] = generated.instance
            yield from (option.parameter(key) for key, option in generated.options.items())
        elif from_field := next((each for each in metadata if isinstance(each, FromField)), None):
            yield from_field.parameter(name)
        else:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _declaration(parameter: inspect.Parameter) -> tuple[str, Any, Sequence[Any], bool]:
    """A parameter's name, its type, what `Annotated` says besides, and whether the type may be None."""
    kind, metadata = parameter.annotation, ()
    if get_origin(kind) is Annotated:
        kind, *metadata = get_args(kind)
    may_lack = _is_union(kind) and type(None) in get_args(kind)
    return parameter.name, _unwrapped(kind, [])[0], metadata, may_lack


def _is_settings(kind: Any) -> bool:
    if "pydantic" not in sys.modules:  # then there are no such classes yet
        return False
    from bertkit.settings import Settings

    return isinstance(kind, type) and issubclass(kind, Settings)


def _single(name: str, given: Mapping[str, Any]) -> Any:
    return given[name]


def _gathered(
    kind: type[Options], inner: Mapping[str, Callable[[dict[str, Any]], Any]], given: dict[str, Any]
) -> Options:
    return kind(**{name: gather(given) for name, gather in inner.items()})


def _parameters_of(kind: type[Options]) -> list[inspect.Parameter]:
    """The fields of a class of options as parameters, its own before those of the class that it extends."""
    hints = {
        name: hint
        for layer in reversed(kind.__mro__)
        for name, hint in inspect.get_annotations(layer, eval_str=True).items()
    }
    defaults = {each.name: each.default for each in fields(kind)}
    names = [name for layer in kind.__mro__ for name in inspect.get_annotations(layer)]
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hints[name])
        for name in dict.fromkeys(names)
    ]


# Options that many commands share


def runs_root() -> Path:
    """The directory that runs are made in: BERTKIT_RUNS, else `runs`."""
    return Path(os.environ.get("BERTKIT_RUNS") or "runs")


def cache_root() -> Path:
    """The directory of caches: BERTKIT_CACHE, else `~/.cache/bertkit`."""
    return Path(os.environ.get("BERTKIT_CACHE") or "~/.cache/bertkit").expanduser()


def model_or_default(model: str | None) -> str:
    """The model that is used: the one given, else BERTKIT_MODEL, else the usual one."""
    return model or os.environ.get("BERTKIT_MODEL") or DEFAULT_MODEL


def seed_numbers(text: str | None) -> list[int]:
    """`0-4` and `1,7,9` as numbers; none where nothing is given.

    Raises:
        UsageError: it is neither.
    """
    found: list[int] = []
    for part in () if not text else text.split(","):
        first, dash, last = (each.strip() for each in part.partition("-"))
        if not first.isdecimal() or (dash and (not last.isdecimal() or int(last) < int(first))):
            raise UsageError(f"--seeds {text}: expected numbers and ranges, such as 0-4 or 1,7,9")
        found += range(int(first), int(last if dash else first) + 1)
    return list(dict.fromkeys(found))


def option(*names: str, help: str, metavar: str | None = None, panel: str | None = None, **more: Any) -> Any:
    """An option whose help says what its default is, or that has none."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, show_default=False, **more)


def _common(*names: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    return option(*names, help=help, metavar=metavar, panel=COMMON_PANEL, **more)


def _flag(*names: str, help: str, **more: Any) -> Any:
    return _common(*names, help=help, metavar="", **more)  # typer would show a type, which a flag has no use for


def _quiet(value: bool) -> bool:
    if value:
        console.set_verbosity(-1)
    return value


def _verbose(value: int) -> int:
    if value:
        console.set_verbosity(value)
    return value


def _offline(value: bool) -> bool:
    # huggingface_hub and datasets read these when they are imported, which no command has done yet.
    if value:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    return value


def _complete_recipe(incomplete: str) -> list[str]:
    from bertkit.recipe.find import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def _complete_run(incomplete: str) -> list[str]:
    return sorted(path.parent.name for path in runs_root().glob(f"{incomplete}*/run.json"))


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe: a YAML file, or the name of a shipped one (`bertkit recipes list`).",
        autocompletion=_complete_recipe,
    ),
]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run directory, or the id of one (`bertkit runs list`).", autocompletion=_complete_run
    ),
]
SetOption = Annotated[
    list[str] | None,
    _common(
        "--set", metavar="KEY=VALUE", help="Override a recipe field, e.g. --set data.sequence_length=64. Repeatable."
    ),
]
RunDir = Annotated[
    Path | None,
    _common(
        "--run-dir",
        metavar="DIR",
        help="Directory that the run is written to (default: under BERTKIT_RUNS, else runs/).",
    ),
]
Seed = Annotated[int | None, FromField("bertkit.recipe.base:RecipeBase", "seed", panel=COMMON_PANEL)]
_ENGINE = "bertkit.training.engine_config:EngineConfig"
Device = Annotated[Literal["auto", "cpu", "cuda"] | None, FromField(_ENGINE, "engine.device", panel=COMMON_PANEL)]
Precision = Annotated[
    Literal["auto", "fp32", "bf16"] | None, FromField(_ENGINE, "engine.precision", panel=COMMON_PANEL)
]
BatchTokens = Annotated[
    int | Literal["auto"] | None,
    FromField(_ENGINE, "engine.micro_batch_tokens", "--batch-tokens N", panel=COMMON_PANEL),
]
MaxSteps = Annotated[
    int | None,
    _common("--max-steps", metavar="N", min=1, help="Stop after N optimiser steps; the schedule ends with them."),
]
MaxMinutes = Annotated[
    float | None,
    _common("--max-minutes", metavar="M", min=0, help="Stop after M minutes with a checkpoint saved (exit code 75)."),
]
Data = Annotated[
    list[str] | None,
    option(
        "--data",
        metavar="SOURCE...",
        help="Text in place of the recipe's: files, directories, globs, hub:ORG/NAME, builtin:pydocs, or shards.",
    ),
]
Resume = Annotated[
    str | None,
    option(
        "--resume",
        metavar="[RUN]",
        help="Continue RUN (a run directory), or the newest unfinished run of this recipe.",
    ),
]
Model = Annotated[
    str | None,
    option(
        "--model",
        metavar="MODEL",
        help=f"A Hub id, a model or a run directory (default: BERTKIT_MODEL, else {DEFAULT_MODEL}).",
    ),
]


@dataclass(frozen=True)
class Output(Options):
    """Of every command; `quiet` and `verbose` have taken effect when the command begins."""

    as_json: Annotated[bool, _flag("--json", help="Print one JSON document on stdout.")] = False
    quiet: Annotated[bool, _flag("-q", "--quiet", help="Show warnings and errors only.", callback=_quiet)] = False
    verbose: Annotated[int, _flag("-v", "--verbose", help="Show details.", count=True, callback=_verbose)] = 0


@dataclass(frozen=True)
class Common(Output):
    """Of every command that may use the network."""

    offline: Annotated[bool, _flag("--offline", help="Never access the network.", callback=_offline)] = False


class MeasurementFields(TypedDict):
    """What the arguments of `eval` and `probe` have in common; see `bertkit.evaluation.run.MeasureRequest`."""

    device: Literal["auto", "cpu", "cuda"]
    batch_tokens: int | None
    runs_root: Path
    run_dir: Path | None
    offline: bool
    command: Sequence[str]
    begun: Callable[[RunDirectory], None]


@dataclass(frozen=True)
class Measuring(Common):
    """Of commands that measure a model and write a run directory."""

    batch_tokens: BatchTokens = None
    run_dir: RunDir = None
    device: Device = None

    def request_fields(self) -> MeasurementFields:
        """These options as arguments of a measurement: `EvalRequest(model=..., **common.request_fields())`."""
        return {
            "device": self.device or "auto",
            "batch_tokens": None if self.batch_tokens == "auto" else self.batch_tokens,
            "runs_root": runs_root(),
            "run_dir": self.run_dir,
            "offline": self.offline,
            "command": sys.argv,
            "begun": keep_log,
        }

    def finish(self, run: RunDirectory, document: Mapping[str, Any]) -> None:
        """The result on stdout: the document, or the run's directory."""
        console.info(f"everything is in {run.path}")
        result(document if self.as_json else run.path, as_json=self.as_json)


@dataclass(frozen=True)
class Training(Common):
    """Of commands that train by a recipe."""

    settings: SetOption = None
    plan: Annotated[
        bool, _flag("--plan", help="Print what would run (parameters, tokens, memory, time), and stop.")
    ] = False
    run_dir: RunDir = None
    seed: Seed = None
    device: Device = None
    precision: Precision = None
    max_steps: MaxSteps = None
    max_minutes: MaxMinutes = None

    @property
    def overrides(self) -> list[Override]:
        """The recipe's fields that these options replace, those of `--set` last."""
        return [*recipe_overrides(self), *set_overrides(self.settings)]

    def finish(self, run: RunDirectory, results: Mapping[str, Any]) -> None:
        """The result on stdout: a document of the run and its results, or the run's directory."""
        document = {
            "run": str(run.path),
            "status": "done",
            "steps": run.record["steps"],
            "tokens": run.record["tokens"],
            "results": results,
        }
        result(document if self.as_json else str(run.path), as_json=self.as_json)

    def finish_plan(self, plan: dict[str, Any]) -> None:
        """What would run, on stdout: the document, or a line for each of its fields."""
        if self.as_json:
            result(plan, as_json=True)
            return
        parameters = plan["parameters"]
        rows = {
            "recipe": f"{plan['recipe']} ({plan['what_hash'][:8]})",
            "parameters": f"{parameters['total']:,} ({parameters['backbone']:,} without heads)",
            "steps": f"{plan['steps']:,}",
            "tokens": f"{plan['tokens']:,}",
            "FLOPs": f"{plan['flops']:.3g}",
            "memory": f"{plan['memory_mb']:,.0f} MB",
            "disk": f"{plan['disk_mb']:,.0f} MB",
            "time here": duration(plan["seconds"]),
        }
        for name, value in rows.items():
            result(f"{name:<12}{value}")


Models = Annotated[
    list[str] | None,
    option(
        "--model",
        metavar="MODEL",
        help="A Hub id, a model or a run directory; RUN@500 is the checkpoint of that step, RUN@all every one that the"
        f" run has kept. Repeatable where a probe compares models (default: BERTKIT_MODEL, else {DEFAULT_MODEL}).",
    ),
]
Texts = Annotated[
    list[str] | None,
    option(
        "--data",
        metavar="SOURCE...",
        help="Text: files, directories, globs, hub:ORG/NAME or builtin:pydocs; or treebanks (.conllu).",
    ),
]


@dataclass(frozen=True)
class Probing(Measuring):
    """Of every kind of probe that writes a run directory."""

    def request(self, models: Sequence[str] | None, data: Sequence[str] | None = None) -> ProbeRequest:
        """The arguments that all kinds of probe have."""
        from bertkit.probing.run import ProbeRequest

        return ProbeRequest(
            models=models or [model_or_default(None)],
            data=data or (),
            progress=console.progress,
            **self.request_fields(),
        )

    def show(self, probed: Probed) -> None:
        """The findings as sentences on stderr; the contract's document or the run's directory on stdout."""
        for sentence in probed.sentences:
            console.info(sentence)
        assert probed.run is not None
        self.finish(probed.run, probed.document)


def recipe_overrides(given: Options) -> list[Override]:
    """The overrides of the recipe that options of `FromField` make; none of those that are not given."""
    from bertkit.recipe.resolve import Override

    found = []
    for parameter in _parameters_of(type(given)):
        value = getattr(given, parameter.name)
        for each in get_args(parameter.annotation)[1:]:
            if isinstance(each, FromField) and value is not None:
                found.append(Override(each.key, value, f"--{parameter.name.replace('_', '-')}"))
    return found


def set_overrides(texts: Sequence[str] | None) -> list[Override]:
    """The overrides of `--set KEY=VALUE`.

    Raises:
        UsageError: one has another form.
    """
    from bertkit.recipe.resolve import Override

    return [Override.parse(text) for text in texts or ()]


def keep_log(run: RunDirectory) -> None:
    """Write the traceback of a bug in the run's log; what a request's `begun` is for."""
    console.log_file = run.log_file
