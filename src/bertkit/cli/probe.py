"""`bertkit probe`: what a model knows and how it attends, kind by kind.

Nothing here follows a paper; each kind's job does. A kind is a subcommand with options of its own. To add one, write
its function beside the others (cli/probe_*.py) and enter it in KINDS; it is imported when it is asked for.
"""

from __future__ import annotations

import typer

from bertkit.cli.groups import LazyGroup

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


class KindGroup(LazyGroup):
    """The kinds."""

    table = KINDS
    called = "kind of probe"
    path = "bertkit probe"


app = typer.Typer(
    help="Look into a model; each kind has options of its own: `bertkit probe KIND --help`.",
    cls=KindGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def probe() -> None:
    """Look into a model; each kind has options of its own: `bertkit probe KIND --help`."""
