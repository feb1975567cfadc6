"""`bertkit eval`: the suites that evaluate a model, and the commands that score or check saved predictions.

To add a suite, write its function and add it to SUITES. Published tasks (eval_tasks.py) and a run with a new file
(eval_data.py) are suites, too; `score`, `check` and `ensemble` need no model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from bertkit.cli.commands import CommandGroup
from bertkit.tasks.catalogue import TASKS

SUITES = {
    "glue": "bertkit.cli.eval_tasks:glue",
    "blimp": "bertkit.cli.eval_suites:blimp",
    "babylm": "bertkit.cli.eval_babylm:babylm",
    "mlm": "bertkit.cli.eval_suites:mlm",
    "lm": "bertkit.cli.eval_suites:lm",
    "surprisal": "bertkit.cli.eval_suites:surprisal",
    "translation": "bertkit.cli.eval_suites:translation",
    "speed": "bertkit.cli.eval_speed:speed",
    "sts": "bertkit.cli.eval_embeddings:sts",
    "pairs": "bertkit.cli.eval_embeddings:pairs",
    "triplets": "bertkit.cli.eval_embeddings:triplets",
    "clustering": "bertkit.cli.eval_embeddings:clustering",
    "retrieval": "bertkit.cli.eval_embeddings:retrieval",
}
"""Each suite's name on the command line and its command."""

NEW_DATA = "RUN"
"""A placeholder for a run's name, which is a command of its own: `bertkit eval RUN --data F`."""

WITHOUT_MODEL = {
    "score": "bertkit.cli.eval_saved:score",
    "check": "bertkit.cli.eval_saved:check",
    "ensemble": "bertkit.cli.eval_saved:ensemble",
}
"""Commands that read saved predictions."""

PUBLISHED = [name for name, task in TASKS.items() if "train" in task.splits]
"""The published tasks that a model can be fine-tuned for."""


class Suites(CommandGroup):
    """Evaluate a model; each suite has its own options: `bertkit eval SUITE --help`.

    The names after `ensemble` are published tasks, for which a model without the task's head is fine-tuned first:
    `bertkit eval mrpc --model MODEL --data-dir glue`
    """

    table: ClassVar = {
        NEW_DATA: "bertkit.cli.eval_data:data",
        **SUITES,
        **WITHOUT_MODEL,
        **dict.fromkeys(PUBLISHED, ""),
    }
    noun = "suite"
    metavar = "SUITE"
    path = "bertkit eval"

    def known_name(self, name: str) -> str | None:
        """Published tasks in any spelling: SST-2 is sst2."""
        if name in self.table:
            return name
        plain = {"".join(filter(str.isalnum, task)): task for task in PUBLISHED}
        return plain.get("".join(filter(str.isalnum, name.lower())))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A run given instead of a suite becomes the first argument of the command that scores it on a new file."""
        is_suite = self.known_name(args[0]) is not None or args[0].startswith("-")
        if not is_suite and (Path(args[0]).exists() or any(each.partition("=")[0] == "--data" for each in args)):
            name, command, _ = super().resolve_command(ctx, [NEW_DATA])
            return name, command, args
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """All names but the placeholder: for a run's path, the shell completes file names."""
        return [each for each in super().shell_complete(ctx, incomplete) if each.value != NEW_DATA]

    def load(self, name: str) -> Callable[..., None] | type[CommandGroup]:
        if name not in PUBLISHED:
            return super().load(name)
        from bertkit.cli.eval_tasks import task_command

        return task_command(TASKS[name])

    def summary(self, name: str) -> str:
        return TASKS[name].title if name in PUBLISHED else super().summary(name)
