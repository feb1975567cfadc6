"""docs/objectives.md: every link leads to the line of its name, and every available choice is listed."""

from __future__ import annotations

import re

import pytest

from bertkit.objectives.masking import AnyUnits
from bertkit.objectives.registry import OBJECTIVES
from tests.objectives.page_lines import CHECKOUT, LINK, PAGE, lines_of, with_lines

TEXT = PAGE.read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ")]
ROWS = [row for row in ROWS if not row.startswith("| says ")]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split(" | ")]


def test_every_link_leads_to_what_it_names() -> None:
    links = LINK.findall(TEXT)
    assert len(links) > 100
    wrong = []
    for name, target, _ in links:
        path = (PAGE.parent / target).resolve()
        assert path.is_relative_to(CHECKOUT)
        there = path.is_file() and (name in lines_of(path) if path.suffix == ".py" else name == path.stem)
        if not there:
            wrong.append(f"{name} in {target}")
    assert not wrong


def test_every_link_into_code_has_the_line() -> None:
    assert with_lines(TEXT) == TEXT, "functions have moved; run `make lines`"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: cells(row)[0][:40])
def test_every_row_says_where_and_by_what_test_or_that_it_is_left(row: str) -> None:
    _, does, where, tested = cells(row)
    left = does.startswith("left")
    assert left or all("../src/" in target or "../recipes/" in target for _, target, _ in LINK.findall(where))
    assert left or LINK.search(where)
    tests = LINK.findall(tested)
    assert left or tests
    assert all("../tests/" in target and name.startswith("test_") for name, target, _ in tests)


def test_every_objective_and_every_unit_of_masking_has_its_row() -> None:
    text = "\n".join(cells(row)[2] for row in ROWS)
    units = [kind.__name__ for kind in AnyUnits.__args__[0].__args__ if kind.__name__ != "Tokens"]
    assert "Words" in units
    for name in [kind.__name__ for kind in OBJECTIVES.values()] + units:
        assert re.search(rf"\[{name}[\].]", text), f"docs/objectives.md has no row with a link to {name}"
