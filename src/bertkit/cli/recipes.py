"""`bertkit recipes`: what ships, and what a recipe comes to once `extends` and `--set` are applied.

Nothing here follows a paper. Sibling runs.py looks at what was run; this looks at what can be.
"""

from __future__ import annotations

from bertkit.cli.common import RecipeName, SetOption, command_app, result, story
from bertkit.cli.shared import Telling, with_options

app = command_app("List the shipped recipes, or show one in full.")


@app.command("list")
@with_options
def list_recipes(*, common: Telling) -> None:
    """List the recipes that ship: name, kind, title, paper."""
    from bertkit.recipe.resolve import shipped_headers

    headers = shipped_headers()
    if common.as_json:
        result(headers, as_json=True)
        return
    width = max((len(header["name"]) for header in headers), default=0)
    for header in headers:
        result(f"{header['name']:{width}}  {header['kind']}  {header['title'] or ''}")
    story.info(f"{len(headers)} recipes; `bertkit recipes show NAME` shows one in full")


@app.command("show")
@with_options
def show_recipe(
    recipe: RecipeName,
    overrides: SetOption = None,
    *,
    common: Telling,
) -> None:
    """Show a recipe resolved: every setting, defaults included, as YAML (or JSON)."""
    from bertkit.recipe.dump import dump_recipe
    from bertkit.recipe.hashing import what_hash
    from bertkit.recipe.load import load_any

    resolved = load_any(recipe, overrides or ())
    result(resolved.model_dump(mode="json") if common.as_json else dump_recipe(resolved), as_json=common.as_json)
    story.info(f"what-hash {what_hash(resolved)}")
