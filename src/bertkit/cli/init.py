"""`bertkit init`: write your own recipe, with each setting explained.

Sibling recipes.py shows the shipped ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertkit.cli.completion import complete_recipe
from bertkit.cli.console import console, result
from bertkit.cli.options import Output, option
from bertkit.errors import UsageError
from bertkit.visible import shell_word, visible


def init(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Recipe file to write; its name becomes the run's name.")
    ] = Path("my-recipe.yaml"),
    source: Annotated[
        str,
        option(
            "--from",
            metavar="RECIPE",
            help="Recipe to start from (default: bert-tiny; `bertkit recipes list` shows all).",
            autocompletion=complete_recipe,
        ),
    ] = "bert-tiny",
    *,
    common: Output,
) -> None:
    """Write a recipe to start from: every setting of a shipped recipe, each explained by a comment above it.

    Examples:
    `bertkit init my-model.yaml --from fast-encoder`
    """
    from bertkit.files import write_text
    from bertkit.recipe.commented import commented_recipe
    from bertkit.recipe.resolve import load_any

    if file.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{file}: a recipe's file name must end in .yaml")
    if file.exists():
        raise UsageError(f"{file}: already exists; choose another name, or delete it first")
    recipe = load_any(source, [])
    word, base = (visible(shell_word(each)) for each in (file, source))
    heading = f"# Written by `bertkit init {word} --from {base}`. A key that is left out has its default value."
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, f"{heading}\n#\n#   bertkit {recipe.kind} {word}\n\n{commented_recipe(recipe)}")
    console.info(f"edit it, then run `bertkit {recipe.kind} {word}`; --plan shows what that would cost")
    result({"recipe": file, "from": source, "kind": recipe.kind} if common.as_json else file, as_json=common.as_json)
