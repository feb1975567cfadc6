"""Finds the files of recipes: the user's own, and those shipped with the package.

Not from a paper. `recipes/roberta.yaml`, `roberta.yaml` and `roberta` name the same recipe, and a file in the working
directory takes precedence. Sibling resolve.py reads the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import bertkit
from bertkit.errors import UsageError
from bertkit.visible import shell_word

SUFFIXES = (".yaml", ".yml")


@cache
def shipped_directory() -> Path:
    """The directory of shipped recipes: inside the installed package, else `recipes` in the source checkout."""
    package = Path(bertkit.__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def recipe_names() -> list[str]:
    """The names of the shipped recipes, sorted; files whose name begins with `_` are only extended by others."""
    return sorted(path.stem for path in shipped_directory().glob("*.yaml") if not path.name.startswith("_"))


def find_recipe(name: str, extended_by: Path | None = None) -> Path:
    """The file of a recipe.

    Searched in this order: next to the file whose `extends` names it (never that file itself, so that the user's own
    `bert.yaml` can extend the shipped `bert`), the working directory, its `recipes` folder, the shipped recipes.

    Raises:
        UsageError: there is none; the nearest name is given.
    """
    for path in _candidates(name, extended_by):
        if path.exists() and not path.is_dir() and not (extended_by and path.samefile(extended_by)):
            return path
    if not extended_by and (hint := _taken_for_a_recipe(Path(name))):
        raise UsageError(f"{name!r} {hint}")
    known = [*(path.stem for folder in (Path(), Path("recipes")) for path in folder.glob("*.yaml")), *recipe_names()]
    near = get_close_matches(_stem(name), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`bertkit recipes list` shows what ships"
    source = f"{extended_by}: extends: " if extended_by else ""
    what = "no such file" if name.endswith(SUFFIXES) or "/" in name else "no such recipe, neither here nor shipped"
    raise UsageError(f"{source}{name!r}: {what}; {hint}")


def _taken_for_a_recipe(path: Path) -> str:
    """What a path that is not a recipe is, and how to pass it; empty if it does not exist."""
    if (path / "run.json").is_file():
        run, file = shell_word(path), shell_word(path / "recipe.yaml")
        return f"is a run; continue it with --resume {run}, or start a new run from its recipe, {file}"
    if path.is_dir():
        return "is a directory; give a recipe's name or a .yaml file (give text with --data)"
    return f"is not a recipe (a .yaml file); give text with --data {shell_word(path)}" if path.is_file() else ""


def _candidates(name: str, extended_by: Path | None) -> Iterator[Path]:
    has_suffix = name.endswith(SUFFIXES)
    # A file without the suffix counts only as a path with a slash, because `bert` may be a user's data file.
    names = [name] if has_suffix else [*(name + suffix for suffix in SUFFIXES), *([name] if "/" in name else [])]
    for folder in [*([extended_by.parent] if extended_by else []), Path(), Path("recipes")]:
        yield from (folder / each for each in names)
    if name.removeprefix("recipes/") == Path(name).name:
        yield shipped_directory() / f"{_stem(name)}.yaml"


def _stem(name: str) -> str:
    last = Path(name).name
    return last.rsplit(".", 1)[0] if last.endswith(SUFFIXES) else last
