"""Options shared by many commands, and the runs' directory.

The names are those of the command-line contract. Sibling generated_options.py makes options from settings classes.
Nothing heavy is imported: torch, datasets and the rest are imported by the commands that need them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from bertkit.cli.completion import COMPLETIONS, complete_recipe, complete_run
from bertkit.cli.console import console, result
from bertkit.cli.generated_options import FromField, Options, annotation_parts, escaped, fields_of
from bertkit.cli.launch import Request, trained
from bertkit.cli.plans import print_plan
from bertkit.errors import UsageError
from bertkit.run import runs_root

if TYPE_CHECKING:
    from bertkit.jobs.settings import ExecutorSettings
    from bertkit.recipe.resolve import Override
    from bertkit.run.directory import RunDirectory
    from bertkit.run.stored import RunLocation
    from bertkit.settings import Settings
    from bertkit.training.run import FinishedRun

Schema = TypeVar("Schema", bound="Settings")

DEFAULT_MODEL = "google-bert/bert-base-uncased"
"""The model if neither the command line nor BERTKIT_MODEL names one."""

READING = "bertkit.tasks.readers.read_options:TableReadOptions"
"""The class of the options for reading a file of rows."""

COMMON_PANEL = "Common options"


def model_or_default(model: str | None) -> str:
    """The given model, else BERTKIT_MODEL, else the default one."""
    return model or os.environ.get("BERTKIT_MODEL") or DEFAULT_MODEL


MOST_SEEDS = 1000


def seed_numbers(text: str | None) -> list[int]:
    """The numbers in `0-4` or `1,7,9`; none if nothing is given.

    Raises:
        UsageError: it is neither.
    """
    found: list[int] = []
    for part in () if text is None else text.split(","):
        first, dash, last = (each.strip() for each in part.partition("-"))
        start, end = _seed(first), _seed(last if dash else first)
        if start is None or end is None or end < start:
            raise UsageError(f"--seeds {text:.60}: expected numbers below 2^32 and ranges, such as 0-4 or 1,7,9")
        if len(found) + end - start >= MOST_SEEDS:
            raise UsageError(f"--seeds {text:.60}: more than {MOST_SEEDS:,} seeds; choose fewer")
        found += range(start, end + 1)
    return list(dict.fromkeys(found))


def _seed(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) and int(text) < 2**32 else None


def option(*names: str, help: str, metavar: str | None = None, panel: str | None = None, **more: Any) -> Any:
    """An option whose help names its default, or that has none; the shell completes runs and tasks."""
    more.setdefault("autocompletion", COMPLETIONS.get(metavar or ""))
    return typer.Option(*names, help=escaped(help), metavar=metavar, rich_help_panel=panel, show_default=False, **more)


def _common(*names: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    return option(*names, help=help, metavar=metavar, panel=COMMON_PANEL, **more)


def _flag(*names: str, help: str, **more: Any) -> Any:
    return _common(*names, help=help, metavar="", **more)  # typer would show a type, which makes no sense for a flag


def _quiet(value: bool) -> bool:
    if value:
        console.set_verbosity(-1)
    return value


def _verbose(value: int) -> int:
    if value:
        console.set_verbosity(value)
    return value


def _offline(value: bool) -> bool:
    # huggingface_hub and datasets read these on import; no command has imported them yet.
    if value:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
        os.environ.setdefault("WANDB_MODE", "offline")
    return value


def run_argument(metavar: str = "RUN") -> Any:
    """The argument that names a run."""
    help = "Run: its directory or its id (see `bertkit runs list`)."
    return typer.Argument(metavar=metavar, help=help, autocompletion=complete_run)


def batch_tokens_of(given: int | str | None) -> int | None:
    """The value of `--batch-tokens`; None if the device's default is used.

    Raises:
        UsageError: it is neither a whole number above 0 nor `auto`.
    """
    from bertkit.recipe.resolve import Override
    from bertkit.training.engine_config import EngineConfig

    if given is None:
        return None
    tokens = validated(EngineConfig, [Override("micro_batch_tokens", given, "--batch-tokens")]).micro_batch_tokens
    return None if tokens == "auto" else tokens


def validated(schema: type[Schema], given: Sequence[Override]) -> Schema:
    """The settings with these values, and defaults for the others.

    Raises:
        UsageError: a value is not valid; the message names its option.
    """
    from bertkit.recipe.errors import validate
    from bertkit.recipe.resolve import with_values
    from bertkit.recipe.tree import Located

    tree = with_values(Located.of({}, "the options"), given)
    return validate(tree, schema, what="the command line", with_keys=False)


OlderThan = Annotated[
    float | None, option("--older-than", metavar="DAYS", min=0, help="Only entries at least this many days old.")
]
DryRun = Annotated[bool, option("--dry-run", help="Show what would be deleted without deleting it.", metavar="")]
Yes = Annotated[bool, option("--yes", "-y", help="Delete without asking.", metavar="")]

RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Recipe: a YAML file, or the name of a shipped recipe (see `bertkit recipes list`).",
        autocompletion=complete_recipe,
    ),
]
RunName = Annotated[str, run_argument()]
Metrics = Annotated[
    list[str] | None,
    option(
        "--metric",
        metavar="NAME-OR-PATH",
        help="Also report this `evaluate` metric: the path of a script, a cached metric, or hub:NAME, which is"
        " downloaded and run. Repeatable.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    _common(
        "--set",
        metavar="KEY=VALUE",
        help="Override a recipe field, e.g. --set optimisation.steps=500. Repeatable.",
    ),
]


def _local_directory(value: Path | None) -> Path | None:
    from bertkit.stores.url import SCHEMES

    scheme = str(value).partition(":/")[0]  # a path has lost one of the slashes
    if value is not None and scheme in SCHEMES and str(value) != scheme:
        raise UsageError(f"--run-dir {scheme}://...: runs of this command are written to a local directory; give one")
    return value


_RUN_DIR = "Directory to write the run to (default: a new one in BERTKIT_RUNS, else in runs/)."
RunDir = Annotated[Path | None, _common("--run-dir", metavar="DIR", help=_RUN_DIR, callback=_local_directory)]
ResumableRunDir = Annotated[
    Path | None,
    _common(
        "--run-dir",
        metavar="DIR",
        help=f"{_RUN_DIR} With --resume RUN, a copy of RUN is continued there.",
        callback=_local_directory,
    ),
]
StorableRunDir = Annotated[
    str | None,
    _common(
        "--run-dir",
        metavar="DIR-or-URL",
        help="Directory to write the run to (default: a new one in BERTKIT_RUNS, else in runs/), or a location on a"
        " store (s3://BUCKET/RUN) to upload it to while it runs. With --resume RUN, a copy of RUN is continued there.",
    ),
]
Seed = Annotated[int | None, FromField("bertkit.recipe.header:RecipeHeader", "seed", panel=COMMON_PANEL)]
_ENGINE = "bertkit.training.engine_config:EngineConfig"
DataDir = Annotated[str | None, FromField("bertkit.finetuning.inputs:FinetuneData", "data.directory", "--data-dir DIR")]
Device = Annotated[Literal["auto", "cpu", "cuda"] | None, FromField(_ENGINE, "engine.device", panel=COMMON_PANEL)]
Precision = Annotated[
    Literal["auto", "fp32", "bf16"] | None, FromField(_ENGINE, "engine.precision", panel=COMMON_PANEL)
]
BatchTokens = Annotated[
    int | Literal["auto"] | None,
    FromField(_ENGINE, "engine.micro_batch_tokens", "--batch-tokens N", panel=COMMON_PANEL),
]
Processes = Annotated[int | None, FromField(_ENGINE, "engine.ranks", "--nproc N", panel=COMMON_PANEL)]
ReportTo = Annotated[list[str] | None, FromField(_ENGINE, "engine.report_to", "--report-to NAME,NAME", COMMON_PANEL)]
_EXECUTOR = "bertkit.jobs.settings:ExecutorSettings"
Jobs = Annotated[int | None, FromField(_EXECUTOR, "engine.jobs", "--jobs N")]
ExecutorName = Annotated[Literal["local", "ray"] | None, FromField(_EXECUTOR, "engine.executor")]
Plan = Annotated[bool, _flag("--plan", help="Print what would run (parameters, tokens, memory, time) and stop.")]
Fresh = Annotated[
    bool, _flag("--fresh", help="Run again even if a finished run of the same recipe, data and code exists.")
]
MaxSteps = Annotated[
    int | None,
    _common(
        "--max-steps",
        metavar="N",
        min=1,
        help="Stop after N optimiser steps; the learning-rate schedule ends there too.",
    ),
]
MaxMinutes = Annotated[
    float | None,
    _common("--max-minutes", metavar="M", min=0, help="Save a checkpoint and stop after M minutes (exit code 75)."),
]
Data = Annotated[
    list[str] | None,
    option(
        "--data",
        metavar="SOURCE...",
        help="Text to use instead of the recipe's: files, directories, globs, any of these on a store"
        " (s3://BUCKET/TEXT), hub:ORG/NAME, builtin:pydocs, or token shards.",
    ),
]
Resume = Annotated[
    str | None,
    option(
        "--resume",
        metavar="[RUN]",
        help="Continue RUN (a run directory, or its location on a store) or, without RUN, the newest unfinished run of"
        " this recipe.",
    ),
]
Model = Annotated[
    str | None,
    option(
        "--model",
        metavar="MODEL",
        help="A Hub id, a model directory or a run directory, also on a store (s3://BUCKET/RUN)"
        " (default: BERTKIT_MODEL, else BERT base, uncased).",
    ),
]


@dataclass(frozen=True)
class Output(Options):
    """Options of every command; `quiet` and `verbose` have taken effect before the command begins."""

    as_json: Annotated[bool, _flag("--json", help="Print one JSON document on stdout.")] = False
    quiet: Annotated[bool, _flag("-q", "--quiet", help="Show warnings and errors only.", callback=_quiet)] = False
    verbose: Annotated[
        int, _flag("-v", "--verbose", help="Show debug messages too.", count=True, callback=_verbose)
    ] = 0


@dataclass(frozen=True)
class Common(Output):
    """Options of every command that may use the network."""

    offline: Annotated[bool, _flag("--offline", help="Never access the network.", callback=_offline)] = False


@dataclass(frozen=True)
class Recording(Common):
    """Options of commands that measure and write a run directory."""

    def record_fields(self, run_dir: Path | None) -> dict[str, Any]:
        """The arguments of a measurement about its run."""
        return {
            "runs_root": runs_root(),
            "run_dir": run_dir,
            "offline": self.offline,
            "command": sys.argv,
            "on_start": keep_log,
        }

    def finish(self, run: RunDirectory, document: Mapping[str, Any]) -> None:
        """The result on stdout: the document with the run's directory, or that alone."""
        console.info(f"everything is in {run.path}")
        result({**document, "run": run.path} if self.as_json else run.path, as_json=self.as_json)


@dataclass(frozen=True)
class Measuring(Recording):
    """Options of commands that measure a model, by default in a new run."""

    batch_tokens: BatchTokens = None
    run_dir: RunDir = None
    fresh: Fresh = False
    device: Device = None

    def argument_fields(self) -> dict[str, Any]:
        """These options as arguments of a measurement: `EvalArguments(model=..., **common.argument_fields())`."""
        own = {"device": self.device or "auto", "batch_tokens": batch_tokens_of(self.batch_tokens), "fresh": self.fresh}
        return own | self.record_fields(self.run_dir)


@dataclass(frozen=True)
class Hyperparameters(Options):
    """The most frequently changed recipe keys: short for `--set lr=...` and so on, with the same name in every training
    command."""

    lr: Annotated[float | None, option("--lr", metavar="X", help="Peak learning rate.")] = None
    batch: Annotated[
        int | None,
        option("--batch", metavar="N", min=1, help="Sequences per update, or examples per update on a task."),
    ] = None
    max_length: Annotated[
        int | None,
        option("--max-length", metavar="N", min=8, help="Maximum sequence length in tokens, including special tokens."),
    ] = None

    @property
    def overrides(self) -> list[Override]:
        """The recipe's fields that these options replace, by their short names."""
        from bertkit.recipe.resolve import Override

        given = {name: value for name, value in vars(self).items() if value is not None}
        return [Override(name, value, f"--{name.replace('_', '-')}") for name, value in given.items()]


@dataclass(frozen=True)
class TaskHyperparameters(Hyperparameters):
    """The same for training on a task, whose length is counted in passes over the examples."""

    epochs: Annotated[
        float | None, option("--epochs", metavar="X", help="Number of passes over the task's training examples.")
    ] = None


@dataclass(frozen=True)
class Training(Common):
    """Options of commands that train from a recipe."""

    settings: SetOption = None
    plan: Plan = False
    run_dir: StorableRunDir = None
    fresh: Fresh = False
    seed: Seed = None
    device: Device = None
    precision: Precision = None
    nproc: Processes = None
    max_steps: MaxSteps = None
    max_minutes: MaxMinutes = None
    report_to: ReportTo = None

    @property
    def overrides(self) -> list[Override]:
        """The recipe's fields that these options replace, those of `--set` last."""
        return [*recipe_overrides(self), *set_overrides(self.settings)]

    def place(self, resume: str | None) -> RunLocation:
        """The location of the run named by `--run-dir` and `--resume`."""
        from bertkit.run.stored import RunLocation

        run_dir = None if self.plan else self.run_dir  # a plan writes nothing
        return RunLocation(run_dir, resume, offline=self.offline, progress=console.progress)

    def argument_fields(self, place: RunLocation) -> dict[str, Any]:
        """These options as arguments of a run: `PretrainArguments(recipe=..., **common.argument_fields(place))`."""
        return {
            "runs_root": runs_root(),
            "run_dir": place.run_dir,
            "fresh": self.fresh,
            "offline": self.offline,
            "max_minutes": self.max_minutes,
            "command": sys.argv,
        }

    def execute(
        self,
        place: RunLocation,
        request: Request,
        *,
        plan: Callable[[Request], dict[str, Any]],
        run: Callable[..., FinishedRun],
        show: Callable[[FinishedRun], None],
    ) -> None:
        """Print the plan, or train on all ranks and print the result.

        Args:
            place: where the run is.
            request: the run's arguments.
            plan: makes the plan's document.
            run: trains, such as `finetuning.run.finetune`.
            show: prints scores of the finished run.
        """
        if self.plan:
            print_plan(plan(request), as_json=self.as_json)
            return
        begin = on_start_for(place)
        finished = trained(request, lambda each: run(each, progress=console.progress, on_start=begin))
        if finished is not None:
            show(finished)
            self.finish(place, finished.run, finished.results)

    def finish(self, place: RunLocation, run: RunDirectory, results: Mapping[str, Any]) -> None:
        """Wait until the run is completely written or uploaded, then print the result: a document of the run and its
        results, or the run's directory."""
        place.complete()
        shown = place.shown(run.path)
        document = {
            "run": shown,
            "status": "done",
            "steps": run.record["steps"],
            "tokens": run.record["tokens"],
            "flops": run.record.get("flops"),
            "results": results,
        }
        result(document if self.as_json else shown, as_json=self.as_json)


@dataclass(frozen=True)
class ParallelRunOptions(Options):
    """Options of commands with independent runs."""

    jobs: Jobs = None
    executor: ExecutorName = None

    @property
    def settings(self) -> ExecutorSettings:
        """The executor chosen by these options."""
        from bertkit.jobs.settings import ExecutorSettings

        return ExecutorSettings(executor=self.executor or "local", jobs=self.jobs or 1)

    @property
    def overrides(self) -> list[Override]:
        """The engine's fields that these options replace."""
        return recipe_overrides(self)


def given_flags(options: Options) -> list[str]:
    """The options that were given, as the user writes them; a number may be 0."""
    given = [name for name, value in vars(options).items() if value or (value == 0 and value is not False)]
    return [f"--{name.replace('_', '-')}" for name in given]


def recipe_overrides(given: Options) -> list[Override]:
    """The recipe overrides from the given options of type `FromField`."""
    from bertkit.recipe.resolve import Override

    return [
        Override(each.key, value, each.generated().flag)
        for parameter in fields_of(type(given))
        for each in annotation_parts(parameter.annotation)
        if isinstance(each, FromField) and (value := getattr(given, parameter.name)) is not None
    ]


def set_overrides(texts: Sequence[str] | None) -> list[Override]:
    """The overrides of `--set KEY=VALUE`.

    Raises:
        UsageError: one has an invalid form.
    """
    from bertkit.recipe.resolve import Override

    return [Override.parse(text) for text in texts or ()]


def on_start_for(place: RunLocation) -> Callable[[RunDirectory], None]:
    """`keep_log` for a run that may be uploaded; also starts its upload."""

    def begin(run: RunDirectory) -> None:
        keep_log(run)
        place.begin()

    return begin


def keep_log(run: RunDirectory) -> None:
    """Write the traceback of a bug to the run's log; for a request's `on_start`."""
    console.log_file = run.log_file
