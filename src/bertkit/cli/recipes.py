"""`bertkit recipes`: list the shipped recipes, or show a recipe with `extends` and `--set` applied.

Sibling runs.py does the same for runs.
"""

from __future__ import annotations

from typing import ClassVar

from bertkit.cli.commands import CommandGroup
from bertkit.cli.console import console, result
from bertkit.cli.options import Output, RecipeName, SetOption, set_overrides


class Recipes(CommandGroup):
    """List the shipped recipes, or show one in full."""

    table: ClassVar = {"list": "bertkit.cli.recipes:list_recipes", "show": "bertkit.cli.recipes:show_recipe"}
    path = "bertkit recipes"


def list_recipes(*, common: Output) -> None:
    """List the shipped recipes: name, kind and title; with --json also the paper."""
    from bertkit.recipe.resolve import shipped_headers

    headers = shipped_headers()
    if common.as_json:
        result(headers, as_json=True)
        return
    width = max((len(header["name"]) for header in headers), default=0)
    for header in headers:
        result(f"{header['name']:{width}}  {header['kind']}  {header['title'] or ''}")
    console.info(f"{len(headers)} recipes; `bertkit recipes show NAME` shows one in full")


def show_recipe(
    recipe: RecipeName,
    settings: SetOption = None,
    *,
    common: Output,
) -> None:
    """Show a resolved recipe: every setting, defaults included, as YAML (or JSON)."""
    from bertkit.recipe.dump import dump_recipe
    from bertkit.recipe.hashing import what_hash
    from bertkit.recipe.resolve import load_any
    from bertkit.settings import EVERY_FIELD

    resolved = load_any(recipe, set_overrides(settings))
    if common.as_json:
        result(resolved.model_dump(mode="json", context=EVERY_FIELD), as_json=True)
    else:
        result(dump_recipe(resolved, every_field=True), as_document=True)
    console.info(f"what-hash {what_hash(resolved)}")
