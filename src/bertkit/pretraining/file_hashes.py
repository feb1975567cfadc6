"""Files that a recipe names and that decide its result: their content's hash stands beside their path.

Nothing here follows a paper. A path says nothing of what is in the file; with its hash in the recipe a changed file
changes the hash of the recipe, and a resume names the key. Sibling hashing.py takes it from there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertkit.files import sha256_of
from bertkit.pretraining.recipe import Recipe
from bertkit.recipe.resolve import overrides_of, with_overrides

_FILES = {"lexicon": "lexicon_sha256"}
"""Keys of files, and the keys of their hashes, in the same mapping."""
_PARTS = ("objective", "optimisation.stages")
"""Where such files can be named."""


def with_contents(recipe: Recipe, *, anew: bool = False) -> Recipe:
    """The recipe with the hash of each file that it names; a file that cannot be read is left to whoever reads it.

    Args:
        recipe: resolved.
        anew: replace the hashes that stand there already; otherwise they hold.
    """
    data = recipe.model_dump(mode="json")
    found = {"objective": data["objective"], "optimisation.stages": data["optimisation"]["stages"]}
    hashed = {key: _with_hashes(found[key], anew=anew) for key in _PARTS}
    if hashed == found:
        return recipe
    return with_overrides(recipe, overrides_of(hashed))


def _with_hashes(data: Any, *, anew: bool) -> Any:
    if isinstance(data, list):
        return [_with_hashes(item, anew=anew) for item in data]
    if not isinstance(data, dict):
        return data
    result = {key: _with_hashes(value, anew=anew) for key, value in data.items()}
    for key, path in data.items():
        section, dot, name = key.rpartition(".")  # a stage's keys are dotted
        if name in _FILES:
            hash_key = f"{section}{dot}{_FILES[name]}"
            if anew or data.get(hash_key) is None:
                result[hash_key] = _hash_of(path)
    return result


def _hash_of(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return sha256_of(Path(path).expanduser())
    except OSError:
        return None
