"""Packages import only those below them in docs/architecture.md, and libraries only where pyproject.toml names them."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest

import bertkit

ROOT = Path(bertkit.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def levels() -> list[tuple[str, ...]]:
    """The packages of the page's first table, one row per level, top level first."""
    lines = PAGE.read_text(encoding="utf-8").partition("| package | holds |")[2].splitlines()[2:]
    rows = [line.split("|")[1] for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]]
    return [tuple(re.findall(r"`(\w+)`", row)) for row in rows]


@cache
def imports_of(file: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The import statements of a file, inside functions and for types too."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def imported(file: Path) -> set[str]:
    """The packages of bertkit that a file imports."""
    found: set[str] = set()
    for node in imports_of(file):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bertkit."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("bertkit.")}
    return found


def test_the_page_names_every_package_once() -> None:
    named = [name for level in levels() for name in level]
    assert len(named) == len(set(named))
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= set(named)


@pytest.mark.parametrize("package", [name for level in levels() for name in level])
def test_a_package_imports_its_own_level_and_those_below(package: str) -> None:
    below = {name: number for number, level in enumerate(levels()) for name in level}
    files = sorted((ROOT / package).rglob("*.py")) or [ROOT / f"{package}.py"]
    upwards = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imported(file)
        if name in below and below[name] < below[package]
    }
    assert not upwards


def modules_imported(file: Path) -> set[Path]:
    """The files of bertkit that a file imports."""
    found: set[Path] = set()
    for node in imports_of(file):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bertkit."):
            module = ROOT.joinpath(*(node.module or "").split(".")[1:])
            inside = {module / f"{alias.name}.py" for alias in node.names}
            candidates = {module.with_suffix(".py"), *inside}
            found |= {path for path in candidates if path.is_file()}
    return found


def circle_of(graph: dict[Path, set[Path]]) -> list[str]:
    """The files of a cycle in the graph; none if it has no cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [file.name for file in error.args[1]]
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    # A package's __init__ only re-exports names.
    graph = {file: modules_imported(file) for file in ROOT.rglob("*.py") if file.name != "__init__.py"}
    assert circle_of(graph) == []


def test_a_class_name_is_used_once() -> None:
    places: dict[str, list[str]] = {}
    for file in sorted(ROOT.rglob("*.py")):
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE):
            places.setdefault(name, []).append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_pyproject_names_the_libraries_that_are_imported_and_no_other() -> None:
    project = tomllib.loads((PAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = [
        *project["dependencies"],
        *(each for name in ("onnx", "ray", "search", "serve", "wandb", "mlflow") for each in extras[name]),
    ]
    declared = {_plain(re.split(r"[<>=~]", each)[0]) for each in requirements}
    nodes = [node for file in ROOT.rglob("*.py") for node in imports_of(file)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"bertkit", "pydantic_core"}
    distributions = metadata.packages_distributions()
    imported = {_plain(distribution) for root in roots for distribution in distributions.get(root, [root])}
    # torch writes TensorBoard's files, its exporter those of ONNX, and datasets reads .zst, each with a library that is
    # not its dependency. A torch built for a GPU installs triton, and mlflow consists of three distributions.
    assert declared == (imported - {"triton", "mlflow-skinny", "mlflow-tracing"}) | {
        "tensorboard",
        "onnxscript",
        "zstandard",
    }


def _plain(distribution: str) -> str:
    return distribution.lower().replace("_", "-")
