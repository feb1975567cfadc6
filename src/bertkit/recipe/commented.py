"""Writes a shipped recipe as a file to start from: every setting, with its meaning above it.

Not from a paper (contract: `bertkit init`). The comments are the descriptions of the settings' fields, as in `--help`.
Sibling dump.py writes the values.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.header import RecipeHeader

_LINE = re.compile(r"(?P<space> *)(?P<item>- )?(?P<key>[\w-]+):(?: .*)?")
_OF_THE_PAPER = ("name", "paper", "arxiv", "table")
"""Keys of the header that identify the paper and its recipe."""
_WIDTH = 118


def commented_recipe(recipe: RecipeHeader) -> str:
    """The recipe as YAML with a comment above each setting; loading it gives a recipe with the same result.

    The keys that name the recipe's paper are left out: the recipe is now the user's own.
    """
    return "\n".join(_lines(recipe)) + "\n"


def _lines(recipe: RecipeHeader) -> Iterator[str]:
    above: list[tuple[int, Any]] = [(-1, recipe)]
    items = 0
    for line in dump_recipe(recipe, without=_OF_THE_PAPER, every_field=True).splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            yield line
            continue
        key, is_item = found["key"], found["item"] is not None
        indent = len(found["space"]) + (1 if is_item else 0)  # an item is inside the key that it is indented under
        while above[-1][0] >= indent:
            above.pop()
        parent = above[-1][1]
        if is_item:
            value = getattr(parent[items], key, None) if isinstance(parent, tuple) and items < len(parent) else None
            text, items = _about(value), items + 1
        else:
            value = getattr(parent, key, None)
            text = _description(parent, key)
            items = 0 if isinstance(value, tuple) else items
        above.append((indent, value))
        if indent == 0 and isinstance(value, BaseModel | tuple):
            yield ""
        if text:
            prefix = f"{found['space']}# "
            yield from textwrap.wrap(text, _WIDTH, initial_indent=prefix, subsequent_indent=prefix)
        yield line


def _description(parent: Any, key: str) -> str:
    """The description of a field in its settings class."""
    if not isinstance(parent, BaseModel):
        return ""
    field = type(parent).model_fields.get(key)
    return "" if field is None else (field.description or "")


def _about(value: Any) -> str:
    """The first sentence of the docstring of a value's class."""
    return "" if value is None else (inspect.getdoc(type(value)) or "").partition("\n\n")[0].replace("\n", " ")
