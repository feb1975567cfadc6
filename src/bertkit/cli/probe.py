"""`bertkit probe`: what a model knows and how it attends, kind by kind.

Nothing here follows a paper; each kind's job does. A kind is a subcommand with options of its own. To add one, write
its function beside the others (cli/probe_*.py) and enter it in KINDS; it is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperGroup

from bertkit.errors import UsageError

KINDS = {
    "points": "bertkit.cli.probe_states:points",
    "contextuality": "bertkit.cli.probe_states:contextuality",
    "attention": "bertkit.cli.probe_attention:attention",
    "attribution": "bertkit.cli.probe_attention:attribution",
    "effective-attention": "bertkit.cli.probe_attention:effective_attention",
    "heads": "bertkit.cli.probe_heads:heads",
    "layers": "bertkit.cli.probe_syntax:layers",
    "structure": "bertkit.cli.probe_syntax:structure",
    "senses": "bertkit.cli.probe_senses:senses",
    "similarity": "bertkit.cli.probe_states:similarity",
    "behaviour": "bertkit.cli.probe_behaviour:behaviour",
}
"""Each kind's name on the command line, and the module and function that hold its command; one line a kind."""


class KindGroup(TyperGroup):
    """The kinds, imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(KINDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in KINDS:
            return None
        if cmd_name not in self.commands:
            module, _, function = KINDS[cmd_name].partition(":")
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(cmd_name)(getattr(importlib.import_module(module), function))
            self.commands[cmd_name] = typer.main.get_command(alone)
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in KINDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], KINDS, n=1)
            hint = f"did you mean `bertkit probe {near[0]}`?" if near else f"one of: {', '.join(KINDS)}"
            raise UsageError(f"no kind of probe named {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    help="Look into a model; each kind has options of its own: `bertkit probe KIND --help`.",
    cls=KindGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def probe() -> None:
    """Look into a model; each kind has options of its own: `bertkit probe KIND --help`."""
