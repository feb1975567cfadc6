"""Groups of commands that are imported when they are asked for.

Nothing here follows a paper. `--help` of a group needs all of its commands, a command only itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

from bertkit.errors import UsageError


class LazyGroup(TyperGroup):
    """Commands by name, each imported when it is asked for; a wrong name is answered with the nearest one."""

    table: ClassVar[Mapping[str, str]]
    """Each command's name, and the module that holds its `app`, or `module:function` of one without an app."""

    called: ClassVar[str]
    """What one of them is, as in "no ... named x"."""

    path: ClassVar[str]
    """The words before a command's name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.table:
            return None
        if cmd_name not in self.commands:
            command = typer.main.get_command(_app(cmd_name, self.table[cmd_name]))
            command.name = cmd_name
            self.commands[cmd_name] = command
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.table and not args[0].startswith("-"):
            near = get_close_matches(args[0], self.table, n=1)
            hint = f"did you mean `{self.path} {near[0]}`?" if near else f"one of: {', '.join(self.table)}"
            raise UsageError(f"no {self.called} named {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


def _app(name: str, place: str) -> typer.Typer:
    module, _, function = place.partition(":")
    found = importlib.import_module(module)
    if not function:
        app: typer.Typer = found.app
        return app
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(getattr(found, function))
    return alone
