"""The links of docs/objectives.md: where in a file the function, class or method stands that a link names.

python -m tests.objectives.page_lines     writes the lines as they are now into the page (make lines)
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


def with_lines(page: str) -> str:
    """The page with the lines as they are now in the links into src; a link to what is not there stays as it is."""

    def renewed(link: re.Match[str]) -> str:
        name, target, _ = link.groups()
        path = (PAGE.parent / target).resolve()
        line = lines_of(path).get(name) if path.is_relative_to(CHECKOUT / "src") and path.is_file() else None
        return link[0] if line is None else f"[{name}]({target}#L{line})"

    return LINK.sub(renewed, page)


if __name__ == "__main__":
    PAGE.write_text(with_lines(PAGE.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
