"""The README's commands work unchanged on a user's text, with a run made by the first of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pretraining.test_shipped import SHRUNK
from tests.training.tiny_run import write_text

pytestmark = pytest.mark.usefixtures("drawn_figures")

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    """Every `bertkit` line, word by word, without its comment."""
    lines = [line for block in fenced("bash") for line in block.splitlines() if line.startswith("bertkit ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.mark.slow
def test_every_command_runs(bertkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretraining is shrunk like the shipped recipes; RUN stands for the run of the first command."""
    monkeypatch.chdir(tmp_path)
    text = write_text(tmp_path / "my.txt", documents=300)
    new_words = "\n\nThe zebrafish and the nebula saw a quasar." * 8
    (tmp_path / "new.txt").write_text(text.read_text() + new_words)
    for name in ("train.csv", "dev.csv"):
        rows = [f"the {noun} reads list {n},{stars}" for noun, stars in (("cat", 5), ("word", 1)) for n in range(6)]
        (tmp_path / name).write_text("\n".join(["review,stars", *rows]) + "\n")
    small = [f"{key}={value}" for key, value in SHRUNK.items()]
    run = None
    ran = 0
    for words in commands():
        if "--install-completion" in words:
            continue
        if words[0] == "pretrain" and "--resume" not in words:
            shrunk = [each for each in small if "--init" not in words or not each.startswith(("tokenizer.", "model."))]
            shrunk = [word for each in shrunk for word in ("--set", each)]
            words = [*words, *shrunk, *([] if "--max-steps" in words else ["--max-steps", "5"])]
            words = ["3" if word in ("500", "2000") else word for word in words]
        if words[:2] == ["pretrain", "--resume"]:
            stopped = bertkit(
                "pretrain",
                "bert-tiny",
                "--data",
                "my.txt",
                "--max-minutes",
                "0.0001",
                *chain(*(("--set", each) for each in small)),
            )
            assert stopped.code == 75, stopped.stderr
            words = [*words, "--max-minutes", "0.0001"]
        done = bertkit(*[run if word == "RUN" and run else word for word in words])
        assert done.code == (75 if words[:2] == ["pretrain", "--resume"] else 0), (words, done.stderr)
        if run is None and words[0] == "pretrain":
            run = done.stdout.strip().splitlines()[-1]
        ran += 1
    assert ran >= 10
    (script,) = (block for block in fenced("python") if "bertkit.load" in block)
    names: dict[str, Any] = {}
    exec(script.replace('"RUN"', repr(run)), names)  # the page's own lines
    assert names["vectors"].shape[0] == 2


def test_the_table_of_recipes_names_every_shipped_recipe_and_no_other() -> None:
    from bertkit.recipe.find import recipe_names

    table = README.split("\n## Recipes\n\n")[1].split("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(recipe_names()), "README.md, Recipes: each is named in one row"


def test_every_recipe_of_the_readme_is_valid(tmp_path: Path) -> None:
    from bertkit.pretraining.recipe import load_recipe
    from bertkit.pretraining.stages import stages_of

    blocks = fenced("yaml")
    assert blocks
    for number, block in enumerate(blocks):
        assert yaml.safe_load(block)
        path = tmp_path / f"mine{number}.yaml"
        path.write_text(block, encoding="utf-8")
        assert stages_of(load_recipe(str(path)))
