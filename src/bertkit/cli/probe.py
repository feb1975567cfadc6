"""`bertkit probe`: what a model knows and how it attends, one command for each kind of probe.

Nothing here follows a paper; each kind's probe does. To add one, write its function beside the others (probe_*.py) and
enter it in KINDS.
"""

from __future__ import annotations

from bertkit.cli.commands import CommandGroup

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
"""Each kind's name on the command line and its command."""


class Kinds(CommandGroup):
    """Probe a model; each kind has options of its own: `bertkit probe KIND --help`."""

    table = KINDS
    noun = "kind of probe"
    path = "bertkit probe"
