"""What many commands take and how they end: options as one object in a command's signature.

Nothing here follows a paper. common.py has the single options; here they stand together as dataclasses, one for each
kind of command, and `with_options` spreads such a class over the signature that typer reads:

    @with_options
    def effective_attention(model: Models = None, *, common: Computing) -> None: ...

has an option for `model`, then one for each field of `Computing`: first those of the class itself, then those of the
class it extends. The command gets them as one object. Help page, completion and defaults are as if they were written
out.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_type_hints

from bertkit.cli.common import (
    AsJson,
    Device,
    MaxMinutes,
    MaxSteps,
    Offline,
    Plan,
    Precision,
    Quiet,
    RunDir,
    Seed,
    SetOption,
    Verbose,
    duration,
    option,
    result,
    runs_root,
    story,
)

if TYPE_CHECKING:
    from bertkit.recipe.resolve import Override
    from bertkit.run.directory import RunDirectory

BatchTokens = Annotated[
    int | None,
    option(
        "--batch-tokens",
        metavar="N",
        min=1,
        help="Tokens computed at once (default: 4096 on a CPU, 32768 on a GPU); changes speed and memory alone.",
    ),
]


@dataclass(frozen=True)
class Options:
    """Options that belong together. A field is annotated as a parameter of a command is, and has its default."""


@dataclass(frozen=True)
class Telling(Options):
    """Of every command; `quiet` and `verbose` have taken effect when the command begins."""

    as_json: AsJson = False
    quiet: Quiet = False
    verbose: Verbose = 0


@dataclass(frozen=True)
class Common(Telling):
    """Of every command that may use the network."""

    offline: Offline = False


class ComputingFields(TypedDict):
    """What the requests of `eval` and `probe` have in common; see `bertkit.evaluation.run.EvalArguments`."""

    device: Literal["auto", "cpu", "cuda"]
    batch_tokens: int | None
    runs_root: Path
    run_dir: Path | None
    offline: bool
    command: Sequence[str]
    begun: Callable[[RunDirectory], None]


@dataclass(frozen=True)
class Computing(Common):
    """Of commands that ask a model, and write a run directory."""

    batch_tokens: BatchTokens = None
    run_dir: RunDir = None
    device: Device = None

    def request_fields(self) -> ComputingFields:
        """These options as fields of a request: `EvalArguments(model=..., **common.request_fields())`."""
        return {
            "device": self.device or "auto",
            "batch_tokens": self.batch_tokens,
            "runs_root": runs_root(),
            "run_dir": self.run_dir,
            "offline": self.offline,
            "command": sys.argv,
            "begun": keep_log,
        }

    def finish(self, run: RunDirectory, document: Mapping[str, Any]) -> None:
        """The result on stdout: the document, or the run's directory."""
        story.info(f"everything is in {run.path}")
        result(document if self.as_json else run.path, as_json=self.as_json)


@dataclass(frozen=True)
class Training(Common):
    """Of commands that train by a recipe."""

    overrides: SetOption = None
    plan: Plan = False
    run_dir: RunDir = None
    seed: Seed = None
    device: Device = None
    precision: Precision = None
    max_steps: MaxSteps = None
    max_minutes: MaxMinutes = None

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

    def finish_plan(self, document: dict[str, Any]) -> None:
        """What would run, on stdout: the document, or a line for each of its fields."""
        if self.as_json:
            result(document, as_json=True)
            return
        for name, value in _plan_in_words(document):
            result(f"{name:<12}{value}")


def _plan_in_words(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("recipe", f"{plan['recipe']} ({plan['what_hash'][:8]})"),
        ("parameters", f"{plan['parameters']['total']:,} ({plan['parameters']['backbone']:,} without heads)"),
        ("steps", f"{plan['steps']:,}"),
        ("tokens", f"{plan['tokens']:,}"),
        ("FLOPs", f"{plan['flops']:.3g}"),
        ("memory", f"{plan['memory_mb']:,.0f} MB"),
        ("disk", f"{plan['disk_mb']:,.0f} MB"),
        ("time here", duration(plan["seconds"])),
    ]


def as_overrides(settings: Mapping[str, object]) -> list[Override]:
    """Recipe fields that have options of their own, as `--set` has them; those that are None are not set."""
    from bertkit.recipe.resolve import overrides_of

    return overrides_of({key: value for key, value in settings.items() if value is not None})


def keep_log(run: RunDirectory) -> None:
    """Tell the story in the run's log, too; what a request's `begun` is for."""
    story.log_file = run.log_file


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer, in whose signature each parameter of a class of `Options` is spread to one for each field.

    Stands between `@app.command()` and the function. All parameters are given by name. Where a class extends another,
    its own fields come first.
    """
    parameters: list[inspect.Parameter] = []
    spread: dict[str, type[Options]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, Options):
            spread[parameter.name] = kind
            parameters += _parameters_of(kind)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def of_single_options(**given: Any) -> None:
        gathered = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in spread.items()
        }
        command(**given, **gathered)

    of_single_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return of_single_options


def _parameters_of(kind: type[Options]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    defaults = {field.name: field.default for field in fields(kind)}
    names = [name for layer in kind.__mro__ for name in inspect.get_annotations(layer)]
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hints[name])
        for name in names
    ]
