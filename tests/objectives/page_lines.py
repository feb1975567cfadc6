"""The links of docs/objectives.md: file and line of the function, class or method that a link names.

python -m tests.objectives.page_lines writes current files and lines into the page (make lines)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "objectives.md"
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+)(?:#L(\d+))?\)")


@cache
def lines_of(path: Path) -> Mapping[str, int]:
    """Line of each function, class and method of a file, by dotted name."""
    lines: dict[str, int] = {}

    def visit(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                lines[owner + node.name] = node.lineno
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{owner}{node.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return lines


def place_of(name: str, path: Path) -> Path | None:
    """The file that defines a function, class or method: the linked file, else the only one that contains it now."""
    if path.is_file() and name in lines_of(path):
        return path
    room = CHECKOUT / ("tests" if path.is_relative_to(CHECKOUT / "tests") else "src")
    moved = [file for file in sorted(room.rglob("*.py")) if name in lines_of(file)]
    return moved[0] if len(moved) == 1 else None


def with_lines(page: str) -> str:
    """The page with current files and, for those in src, current lines; a link to a name that is missing or ambiguous
    is left unchanged."""

    def renewed(link: re.Match[str]) -> str:
        name, target, _ = link.groups()
        if not target.endswith(".py"):
            return link[0]
        path = place_of(name, (PAGE.parent / target).resolve())
        if path is None:
            return link[0]
        line = f"#L{lines_of(path)[name]}" if path.is_relative_to(CHECKOUT / "src") else ""
        return f"[{name}](../{path.relative_to(CHECKOUT)}{line})"

    return LINK.sub(renewed, page)


if __name__ == "__main__":
    PAGE.write_text(with_lines(PAGE.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
