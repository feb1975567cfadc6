"""docs/objectives.md: whatever it links to is there, and nothing that can be chosen is missing from it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from bertkit.objectives.registry import OBJECTIVES
from bertkit.objectives.units import AnyUnits

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "objectives.md"
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+)\)")
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
ROWS = [row for row in ROWS if not row.startswith("| says ")]


@cache
def defined(path: Path) -> frozenset[str]:
    """Functions, classes and methods of a file, by dotted name."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(owner + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{owner}{node.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return frozenset(names)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split(" | ")]


def test_every_link_leads_to_what_it_names() -> None:
    links = LINK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(links) > 100
    wrong = []
    for name, target in links:
        path = (PAGE.parent / target).resolve()
        assert path.is_relative_to(CHECKOUT)
        there = path.is_file() and (name in defined(path) if path.suffix == ".py" else name == path.stem)
        if not there:
            wrong.append(f"{name} in {target}")
    assert not wrong


@pytest.mark.parametrize("row", ROWS, ids=lambda row: cells(row)[0][:40])
def test_every_row_says_where_and_by_what_test_or_that_it_is_left(row: str) -> None:
    _, does, where, tested = cells(row)
    left = does.startswith("left")
    assert left or all("../src/" in target or "../recipes/" in target for _, target in LINK.findall(where))
    assert left or LINK.search(where)
    tests = LINK.findall(tested)
    assert left or tests
    assert all("../tests/" in target and name.startswith("test_") for name, target in tests)


def test_every_objective_and_every_unit_of_masking_has_its_row() -> None:
    text = "\n".join(cells(row)[2] for row in ROWS)
    units = [kind.__name__ for kind in AnyUnits.__args__[0].__args__ if kind.__name__ != "Pieces"]
    assert len(units) == 6
    for name in [kind.__name__ for kind in OBJECTIVES.values()] + units:
        assert re.search(rf"\[{name}[\].]", text), name
