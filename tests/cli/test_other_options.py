"""An option of another tool is answered with this command's option or with the key of the recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bertkit.cli.other_options import OTHER_OPTIONS, written_as

Bertkit = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (("pretrain", "bert-tiny", "--output-dir", "x"), "--run-dir"),
        (("pretrain", "bert-tiny", "--steps", "5"), "--set optimisation.steps=VALUE"),
        (("pretrain", "bert-tiny", "--batch_size", "5"), "--batch"),
        (("finetune", "--validation-file", "x"), "--dev"),
        (("finetune", "--weight-decay", "0"), "--set optimisation.optimizer.weight_decay=VALUE"),
        (("distill", "--temperature", "2"), "--set objective.soft_targets.temperature=VALUE"),
        (("embed", "--output", "x"), "--out"),
    ],
)
def test_an_unknown_option_is_told_with_what_to_write(
    arguments: tuple[str, ...], instead: str, bertkit: Bertkit
) -> None:
    done = bertkit(*arguments)
    assert done.code == 2
    option = next(each for each in arguments if each.startswith("--"))
    assert f"No such option: {option}; write {instead}; see `bertkit {arguments[0]} --help`" in done.stderr


def test_an_option_that_nothing_resembles_is_told_as_before(bertkit: Bertkit) -> None:
    assert "No such option: --seeed (Possible options: --seed" in bertkit("pretrain", "--seeed", "3").stderr
    assert "No such option: --xyzzy; see" in bertkit("cache", "info", "--xyzzy").stderr


def test_only_options_of_the_command_are_named(bertkit: Bertkit) -> None:
    """Each is an option of one of these commands, and what a command lacks is not suggested for it."""
    help_text = {
        name: bertkit(*name.split(), "--help").stdout
        for name in ("pretrain", "finetune", "tokenize", "export", "embed", "eval mrpc")
    }
    for named in OTHER_OPTIONS.values():
        for option in named:
            assert any(option in text for text in help_text.values()), option
    assert written_as("--output", ["--to", "--json"], "export") == "write --to"
    assert written_as("--output", ["--json"], "doctor") == ""
