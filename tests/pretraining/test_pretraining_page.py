"""docs/pretraining.md and docs/optimisation.md list every choice of a recipe and no other; its recipe is valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from bertkit.data.layouts import AnyLayout
from bertkit.objectives.masking import AnyUnits
from bertkit.objectives.registry import OBJECTIVES
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.stages import stages_of
from bertkit.text.tokenizer import TokenizerType
from bertkit.training.optimizers import AnyOptimizerConfig
from bertkit.training.schedules import AnySchedule

DOCS = Path(__file__).parents[2] / "docs"
PAGE, OPTIMISATION = ((DOCS / name).read_text(encoding="utf-8") for name in ("pretraining.md", "optimisation.md"))


def names(choices: Any) -> set[str]:
    """The names of the variants of a discriminated union."""
    variants = get_args(get_args(choices)[0])
    plain = [get_args(each)[0] if hasattr(each, "__metadata__") else each for each in variants]
    return {each.model_fields["name"].default for each in plain}


def first_column(page: str, heading: str) -> set[str]:
    """The names in the first column of the table with this heading."""
    table = page.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`([\w-]+)`", row.split(" | ")[0])}


@pytest.mark.parametrize(
    ("page", "heading", "known"),
    [
        (PAGE, "layout", names(AnyLayout)),
        (PAGE, "objective", set(OBJECTIVES)),
        (PAGE, "units", names(AnyUnits)),
        (OPTIMISATION, "`optimizer.name`", names(AnyOptimizerConfig)),
        (OPTIMISATION, "`schedule.name`", names(AnySchedule)),
    ],
    ids=["layouts", "objectives", "units", "optimisers", "schedules"],
)
def test_every_choice_is_listed(page: str, heading: str, known: set[str]) -> None:
    where = "docs/pretraining.md" if page is PAGE else "docs/optimisation.md"
    assert first_column(page, heading) == known, f"{where}, table {heading}: one row for each choice"


def test_every_kind_of_vocabulary_is_listed() -> None:
    (row,) = re.findall(r"^\| `tokenizer.type` \| (.*) \|$", PAGE, re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", row)) == set(get_args(TokenizerType))


def test_the_recipe_of_the_page_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(block, encoding="utf-8")
    assert stages_of(load_recipe(str(tmp_path / "mine.yaml")))
