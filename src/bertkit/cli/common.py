"""Options that many commands share, and where runs and caches lie.

Nothing here follows a paper; the names are those of the command-line contract. A command module imports these aliases,
the story and `result`, and nothing heavy: torch, datasets and the rest wait for the function that needs them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertkit.cli.console import Story, duration, result, story
from bertkit.errors import UsageError
from bertkit.run import NEWEST

__all__ = [
    "DEFAULT_MODEL",
    "MANY_VALUES",
    "OPTIONAL_VALUE",
    "AsJson",
    "Data",
    "Device",
    "MaxMinutes",
    "MaxSteps",
    "Metrics",
    "Model",
    "Offline",
    "Plan",
    "Precision",
    "Quiet",
    "RecipeName",
    "Resume",
    "RunDir",
    "Seed",
    "SetOption",
    "Story",
    "Verbose",
    "cache_root",
    "command_app",
    "duration",
    "model_or_default",
    "option",
    "result",
    "runs_root",
    "seed_numbers",
    "spread_arguments",
    "story",
]

OPTIONAL_VALUE = {"--resume": NEWEST}
"""Options whose value may be left out, with the value that stands for none."""

MANY_VALUES = frozenset({"--data"})
"""Options that take several words, as a shell's glob makes them: `--data *.txt`."""

DEFAULT_MODEL = "google-bert/bert-base-uncased"
"""The model where neither the command line nor BERTKIT_MODEL names one."""

COMMON_PANEL = "Options of every command"


def runs_root() -> Path:
    """The directory that runs are made in: BERTKIT_RUNS, else `runs`."""
    return Path(os.environ.get("BERTKIT_RUNS") or "runs")


def cache_root() -> Path:
    """The directory of caches: BERTKIT_CACHE, else `~/.cache/bertkit`."""
    return Path(os.environ.get("BERTKIT_CACHE") or "~/.cache/bertkit").expanduser()


def model_or_default(model: str | None) -> str:
    """The model asked for: the one given, else BERTKIT_MODEL, else the usual one."""
    return model or os.environ.get("BERTKIT_MODEL") or DEFAULT_MODEL


def seed_numbers(text: str | None) -> list[int]:
    """`0-4` and `1,7,9` as numbers; none where nothing is given.

    Raises:
        UsageError: it is neither.
    """
    found: list[int] = []
    for part in () if text is None else text.split(","):
        first, dash, last = (each.strip() for each in part.partition("-"))
        if not first.isdecimal() or (dash and (not last.isdecimal() or int(last) < int(first))):
            raise UsageError(f"--seeds {text}: expected numbers and ranges, such as 0-4 or 1,7,9")
        found += range(int(first), int(last if dash else first) + 1)
    return list(dict.fromkeys(found))


def command_app(help: str | None = None) -> typer.Typer:
    """The typer app of one command's module: `app = command_app()`, then `@app.command()` on its function or functions.

    One function makes a plain command named after the module; several make a group (`bertkit runs list`), which `help`
    describes.
    """
    return typer.Typer(help=help, add_completion=False, pretty_exceptions_enable=False)


def _quiet(value: bool) -> bool:
    if value:
        story.set_verbosity(-1)
    return value


def _verbose(value: int) -> int:
    if value:
        story.set_verbosity(value)
    return value


def _offline(value: bool) -> bool:
    # The libraries read these when they are imported, which no command has done yet.
    if value:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    return value


def _complete_recipe(incomplete: str) -> list[str]:
    from bertkit.recipe.find import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def option(*names: str, help: str, metavar: str | None = None, panel: str | None = None, **more: Any) -> Any:
    """An option whose help says what its default is, or that has none."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, show_default=False, **more)


def _option(*names: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    return option(*names, help=help, metavar=metavar, panel=COMMON_PANEL, **more)


def _flag(*names: str, help: str, **more: Any) -> Any:
    return _option(*names, help=help, metavar="", **more)  # typer would show a type, which a flag has no use for


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe: a YAML file, or the name of a shipped one (`bertkit recipes list`).",
        autocompletion=_complete_recipe,
    ),
]
Metrics = Annotated[
    list[str] | None,
    option(
        "--metric",
        metavar="NAME-OR-PATH",
        help="Report this `evaluate` metric too: a script's path, a cached metric, or hub:NAME, which is fetched and"
        " run. Repeatable.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    _option(
        "--set", metavar="KEY=VALUE", help="Override a recipe field, e.g. --set data.sequence_length=64. Repeatable."
    ),
]
Plan = Annotated[bool, _flag("--plan", help="Print what would run (parameters, tokens, memory, time), and stop.")]
RunDir = Annotated[
    Path | None,
    _option("--run-dir", metavar="DIR", help="Where the run is written (default: under BERTKIT_RUNS, else runs/)."),
]
Seed = Annotated[
    int | None, _option("--seed", metavar="N", min=0, help="Seed of all randomness, in place of the recipe's.")
]
Device = Annotated[Literal["auto", "cpu", "cuda"] | None, _option("--device", help="Where to compute.")]
Precision = Annotated[
    Literal["auto", "fp32", "bf16"] | None, _option("--precision", help="Number format of the matrix products.")
]
MaxSteps = Annotated[
    int | None,
    _option("--max-steps", metavar="N", min=1, help="Stop after N optimiser steps."),
]
MaxMinutes = Annotated[
    float | None,
    _option("--max-minutes", metavar="M", min=0, help="Stop after M minutes with a checkpoint saved (exit code 75)."),
]
Offline = Annotated[bool, _flag("--offline", help="Use the network for nothing.", callback=_offline)]
AsJson = Annotated[bool, _flag("--json", help="Print one JSON document on stdout.")]
Quiet = Annotated[bool, _flag("-q", "--quiet", help="Tell warnings and errors only.", callback=_quiet)]
Verbose = Annotated[int, _flag("-v", "--verbose", help="Tell more.", count=True, callback=_verbose)]
Model = Annotated[
    str | None,
    option(
        "--model",
        metavar="MODEL",
        help=f"A Hub id, a model or a run directory (default: BERTKIT_MODEL, else {DEFAULT_MODEL}).",
    ),
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
        help="Go on with RUN (a run directory), or with the newest unfinished run of this recipe.",
    ),
]


def spread_arguments(arguments: list[str]) -> list[str]:
    """Bring `--resume [RUN]` and `--data SOURCE...` into the one form that the parser knows: an option with one value.

    A word after a bare `--resume` is its RUN unless it begins with `-` or names a YAML file, which is a recipe. Words
    after the first of `--data` are further sources as long as they look like one: `hub:` or `builtin:`, a `/`, `.` or
    `*` in it, or an existing path; so `--data a.txt quickstart` still ends in a recipe's name.
    """
    spread: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*spread, word, *words]
        if word in OPTIONAL_VALUE:
            has_value = bool(words) and not words[0].startswith("-") and not _is_yaml(words[0])
            spread.append(f"{word}={words.pop(0) if has_value else OPTIONAL_VALUE[word]}")
        elif word in MANY_VALUES and words and not words[0].startswith("-"):
            spread.append(f"{word}={words.pop(0)}")
            while words and _is_source(words[0]):
                spread.append(f"{word}={words.pop(0)}")
        else:
            spread.append(word)
    return spread


def _is_yaml(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def _is_source(word: str) -> bool:
    if word.startswith("-") or _is_yaml(word):
        return False
    return word.startswith(("hub:", "builtin:")) or any(sign in word for sign in "/.*") or os.path.exists(word)
