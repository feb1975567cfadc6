"""The shell completes commands, options, recipes of the command's kind, and tasks."""

from __future__ import annotations

import os

import pytest
import typer

from bertkit.cli import app as app_module
from bertkit.cli.completion import complete_recipe


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("pretrain", []),
        ("distill", ["pkd", "pkd-3"]),
        ("study", []),
        ("show", ["pkd", "pkd-3"]),
    ],
)
def test_only_recipes_of_the_commands_kind_are_completed(command: str, names: list[str]) -> None:
    context = typer.Context(typer.main.get_command(app_module.app), info_name=command)
    assert complete_recipe(context, "pk") == names


def test_the_shell_completes_commands_options_and_recipes(bertkit_process) -> None:
    def complete(line: str) -> str:
        words = len(line.split(" ")) - 1
        env = {**os.environ, "_BERTKIT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(words)}
        done = bertkit_process(env=env)
        assert done.stderr == ""
        return done.stdout

    assert complete("bertkit rec").split() == ["recipes"]
    assert complete("bertkit recipes l").split() == ["list"]
    assert "--json" in complete("bertkit recipes list --j")
    assert complete("bertkit eval bli").split() == ["blimp"]
    assert complete("bertkit eval R").strip() == ""  # RUN stands for a path, which the shell completes
    assert complete("bertkit cache clear pl").split() == ["plans"]
    assert complete("bertkit eval blimp --onl").split() == ["--only"]
    assert complete("bertkit eval mlm --pseudo").split() == ["--pseudo-sequences"]
    assert complete("bertkit finetune --task mnli,qn").split() == ["mnli,qnli"]
    for line in ("bertkit runs show /tmp/x", "bertkit runs show [", "bertkit recipez list --j"):
        assert complete(line).strip() == ""
