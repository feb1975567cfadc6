"""How far a value reaches: in how many importable files code names a recipe or a teacher.

A file that passes a value on without using it must be changed with every change of the value. A file counts if a
variable, a parameter or a field in it has the value's name; attributes (`arguments.recipe`) and keywords of calls do
not. `Settings.unread_keys` is excluded because it reads a recipe in every class that has keys.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import bertkit

ROOT = Path(bertkit.__file__).parent


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def files_of(module: str) -> Iterator[Path]:
    """The file of a module, if it is one, and those of its parent packages, without bertkit/__init__.py, whose names
    are imported when used."""
    folder = ROOT
    for name in module.split(".")[1:]:
        folder = folder / name
        yield from (path for path in (folder / "__init__.py", folder.with_suffix(".py")) if path.is_file())


def imported(file: Path) -> set[Path]:
    """The files of bertkit that a file imports, inside functions and for types too."""
    found: set[Path] = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bertkit."):
            found.update(path for alias in node.names for path in files_of(f"{node.module}.{alias.name}"))
        elif isinstance(node, ast.Import):
            found.update(
                path for alias in node.names if alias.name.startswith("bertkit.") for path in files_of(alias.name)
            )
    return found


def reachable(start: Path) -> set[Path]:
    """The files that may be imported by importing one and running its code."""
    found, waiting = set[Path](), [start]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += imported(file)
    return found


def names(tree: ast.AST, value: str) -> bool:
    """Whether code names a value."""

    def within(node: ast.AST) -> bool:
        if isinstance(node, ast.FunctionDef) and node.name == "unread_keys":
            return False
        if (isinstance(node, ast.Name) and node.id == value) or (isinstance(node, ast.arg) and node.arg == value):
            return True
        return any(map(within, ast.iter_child_nodes(node)))

    return within(tree)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("def size(recipe): return recipe.steps", True),
        ("class Run:\n    recipe: str", True),
        ("run.recipe", False),
        ("plan(recipe=arguments.recipe)", False),
        ("class Ramp:\n    def unread_keys(self, recipe): return recipe.steps", False),
    ],
)
def test_a_variable_a_parameter_or_a_field_names_a_value(source: str, named: bool) -> None:
    assert names(ast.parse(source), "recipe") is named


@pytest.mark.parametrize(("command", "value", "most"), [("pretrain", "recipe", 12), ("distill", "teacher", 25)])
def test_a_value_is_named_in_no_more_files_than_it_was(command: str, value: str, most: int) -> None:
    files = reachable(ROOT / "cli" / f"{command}.py")
    naming = sorted(str(file.relative_to(ROOT)) for file in files if names(tree_of(file), value))
    assert len(files) > 200
    assert len(naming) <= most, "hand on the settings or the part that is used, not the whole:\n" + "\n".join(naming)
