"""What the shell completes a word of the command line with: recipes, runs and published tasks.

Sibling commands.py has the names of commands, which are completed as well. Settings and torch are not imported.
"""

from __future__ import annotations

import typer

from bertkit.run import runs_root


def complete_recipe(ctx: typer.Context, incomplete: str) -> list[str]:
    """The shipped recipes that the command on the line runs; all of them for one that runs none."""
    from bertkit.recipe.resolve import KINDS, shipped_headers

    kinds = {str(ctx.info_name)} & KINDS.keys() or KINDS
    names = [header["name"] for header in shipped_headers() if header["kind"] in kinds]
    return [name for name in names if name.startswith(incomplete)]


def complete_task(incomplete: str) -> list[str]:
    """The published tasks; in a list of tasks, for its last one."""
    from bertkit.tasks.catalogue import TASKS

    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in TASKS if name.startswith(last)]


def complete_run(incomplete: str) -> list[str]:
    names = [path.parent.name for path in runs_root().glob("*/run.json")]
    return sorted(name for name in names if name.startswith(incomplete))


COMPLETIONS = {"[RUN]": complete_run, "TASK": complete_task, "TASK[,TASK]": complete_task}
"""What the shell completes an option's value with, by its metavar."""
