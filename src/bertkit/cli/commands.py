"""Groups of commands, each imported only when it runs or shows its own help.

A group's help page needs one paragraph of each command. It is read from the source file, so that the settings behind
the command's options, and torch with them, are not imported.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import typer
from typer._display import describe_number_range
from typer.core import TyperCommand, TyperGroup

from bertkit.cli.console import console
from bertkit.cli.generated_options import old_spellings, typer_signature
from bertkit.errors import UsageError

_WORD = re.compile("[A-Z]+")
_REQUIRED = re.compile(r"\{(.*)\}(\.\.\.)?")
"""How typer writes a required argument on the usage line."""
_NAMES = frozenset(
    {"MODEL", "F", "FILE", "DIR", "PATH", "RUN", "SOURCE", "RECIPE", "COL", "TASK", "T", "NAME", "ORG", "ZIP", "ARM"}
)
"""Words in the metavars of options and arguments whose value is a name."""

_CHOICES_WIDTH = 12
"""Width at which a list of choices is broken, so that an option's name and help fit beside it in 80 columns."""

_LARGEST_LIMIT = 4096
"""The largest upper limit of a number that the help page shows; larger ones only guard against slips."""


class CommandGroup(TyperGroup):
    """Commands by name, each imported when it is called; a subclass's docstring is the group's help.

    For an unknown name, the error suggests the nearest one.
    """

    table: ClassVar[Mapping[str, str]]
    """Each command's name, and its function, or its class of commands, as `module:name`."""

    noun: ClassVar[str] = "command"
    """The noun for one of them, as in "no command named x"."""

    metavar: ClassVar[str] = "COMMAND"
    """The placeholder for one of them on the usage line."""

    path: ClassVar[str]
    """The words that precede a command's name."""

    def known_name(self, name: str) -> str | None:
        """The command with this name; None if there is none."""
        return name if name in self.table else None

    def load(self, name: str) -> Callable[..., None] | type[CommandGroup]:
        """A command's function, or its class of commands."""
        module, _, attribute = self.table[name].partition(":")
        found: Callable[..., None] | type[CommandGroup] = getattr(import_module(module), attribute)
        return found

    def summary(self, name: str) -> str:
        """A command's line on the group's help page."""
        module, _, attribute = self.table[name].partition(":")
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        nodes = ast.parse(Path(spec.origin).read_bytes()).body
        (found,) = (
            each for each in nodes if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == attribute
        )
        return (ast.get_docstring(found) or "").partition("\n\n")[0]

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def get_params(self, ctx: Any) -> list[Any]:
        return _with_short_types(super().get_params(ctx), ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command's name and summary, for the help page and for completion."""
        known = self.known_name(cmd_name)
        return None if known is None else TyperCommand(known, help=self.summary(known))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself, with its options."""
        name = self.known_name(args[0])
        if name is not None:
            if name not in self.commands:
                self.commands[name] = built(self.load(name), name)
            return name, self.commands[name], args[1:]
        if not args[0].startswith("-") and not ctx.resilient_parsing:  # as while the shell completes a line
            names = self.list_commands(ctx)
            near = get_close_matches(args[0], names, n=1)
            hint = f"did you mean `{self.path} {near[0]}`?" if near else f"one of: {', '.join(names)}"
            raise UsageError(f"no {self.noun} named {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


class RenamedOptions(TyperCommand):
    """A command that still accepts the former names of its options, and for which `--option=~/path` is in the home
    directory, as `--option ~/path` is for a shell."""

    renamed: Mapping[str, str] = MappingProxyType({})
    """Each former name and its new name."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _with_short_types(super().get_params(ctx), ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line without the command's path. A required argument has no braces, which stand for a choice
        elsewhere; one that is the command's own name, as in `bertkit eval RUN`, is already in the path."""
        pieces = [_REQUIRED.sub(r"\1\2", piece) for piece in super().collect_usage_pieces(ctx)]
        return [piece for piece in pieces if piece != ctx.info_name]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        found = []
        for word in args:
            name, equals, value = word.partition("=")
            if name in self.renamed:
                console.warn(f"{name} is now called {self.renamed[name]}")
                word = f"{self.renamed[name]}{equals}{value}"
            if name.startswith("--") and value.startswith("~/") and "--" not in found:
                word = f"{word.partition('=')[0]}={os.path.expanduser(value)}"
            found.append(word)
        if not ctx.resilient_parsing:
            self._refuse_further_data(ctx, found)
            self._refuse_empty_names(ctx, found)
        return super().parse_args(ctx, found)

    def _refuse_further_data(self, ctx: Any, words: list[str]) -> None:
        """Raises:
        UsageError: several values of `--data`, as from a glob, for a command that reads one file.
        """
        options = words[: words.index("--") if "--" in words else None]
        given = [word.removeprefix("--data=") for word in options if word.startswith("--data=")]
        takes_one = any("--data" in each.opts and not each.multiple for each in self.get_params(ctx))
        if takes_one and len(given) > 1:
            raise UsageError(f"--data: takes one file here, but {len(given)} are given: {', '.join(given)}")

    def _refuse_empty_names(self, ctx: Any, words: list[str]) -> None:
        """Raises:
        UsageError: a name of a model, file, column, ... is empty, as the value of a shell variable that is not set.
        """
        values, _, _ = self.make_parser(ctx).parse_args(args=list(words))
        for parameter in self.get_params(ctx):
            metavar, given = parameter.metavar or "", values.get(parameter.name)
            is_empty = "" in given if isinstance(given, list | tuple) else given == ""
            if not is_empty or _NAMES.isdisjoint(_WORD.findall(metavar)):
                continue
            option = parameter.param_type_name == "option"
            leave_out = " or leave the option out" if option else ""
            raise UsageError(
                f"{parameter.opts[0] if option else metavar.strip('[].')}: the value is empty, as that of a shell"
                f" variable that is not set; give one{leave_out}"
            )


def _with_short_types(parameters: list[Any], ctx: Any) -> list[Any]:
    """The parameters; the help page shows no Python type after an argument, whose name tells what it is, or after a
    flag, which takes no value, no technical limit of a number, and breaks a long list of choices between them, so that
    the columns beside it stay wide."""
    for each in parameters:
        if each.max is not None and each.max > _LARGEST_LIMIT:
            each._get_number_range_help_str = partial(describe_number_range, each.min, None)
        choices = _broken_choices(each.display_type(ctx)) if each.type_descriptor.is_choice else None
        if each.param_type_name == "argument":
            each.display_type_rich = partial(_given, choices)
        elif each.metavar is None:
            each.metavar = "" if each.is_flag else choices
    return parameters


def _broken_choices(shown: str) -> str:
    """Choices as typer shows them, `<a|b>` or `<list[a|b]>`, on lines of at most `_CHOICES_WIDTH`."""
    spaced = shown.replace("list[", "").replace("]", "").replace("|", "| ")
    lines = textwrap.wrap(spaced, _CHOICES_WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("| ", "|")


def _given(types: str | None, ctx: Any) -> str | None:
    return types


def built(command: Callable[..., None] | type[CommandGroup], name: str) -> Any:
    """A command or group, ready to run."""
    if isinstance(command, type):
        assert issubclass(command, CommandGroup)
        subcommand = f"{command.metavar} [ARGS]..."
        app = typer.Typer(
            help=inspect.getdoc(command), cls=command, subcommand_metavar=subcommand, add_completion=False
        )
        app.callback()(lambda: None)
        found = typer.main.get_command(app)
    else:
        app = typer.Typer(add_completion=False)
        app.command(name, cls=RenamedOptions, help=_reflowed(command))(typer_signature(command))
        found = typer.main.get_command(app)
        assert isinstance(found, RenamedOptions)
        found.renamed = old_spellings(command)
    found.name = name
    return found


def _reflowed(command: Callable[..., None]) -> str:
    """A command's docstring with each paragraph on one line, for the terminal to wrap; examples stay one per line."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(each if each.startswith("Examples:\n") else " ".join(each.split()) for each in paragraphs)
