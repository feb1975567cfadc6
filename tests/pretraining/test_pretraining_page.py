"""docs/pretraining.md: kinds of vocabularies are listed, and its recipe is valid; other choices: test_choices.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.stages import stages_of
from bertkit.text.tokenizer import TokenizerType

PAGE = (Path(__file__).parents[2] / "docs" / "pretraining.md").read_text(encoding="utf-8")


def test_every_kind_of_vocabulary_is_listed() -> None:
    (row,) = re.findall(r"^\| `tokenizer.type` \| (.*) \|$", PAGE, re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", row)) == set(get_args(TokenizerType))


def test_the_recipe_of_the_page_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(block, encoding="utf-8")
    assert stages_of(load_recipe(str(tmp_path / "mine.yaml")))
