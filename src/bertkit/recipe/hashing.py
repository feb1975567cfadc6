"""The hash of the part of a recipe that determines the result, and the differences of two recipes in it.

Not from a paper. Left out are `engine`, which affects only speed, `metrics`, which are only reported, and the header,
which only describes. The hash names the run and guards `--resume`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bertkit.errors import UsageError
from bertkit.recipe.header import RecipeHeader

NOT_DECIDING = frozenset({"engine", "metrics", "name", "title", "paper", "arxiv", "table"})


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()
"""Placeholder for a key that only one of two recipes has."""


def hashed_settings(recipe: BaseModel) -> dict[str, Any]:
    """The settings that determine the result, as JSON data."""
    return {key: value for key, value in recipe.model_dump(mode="json").items() if key not in NOT_DECIDING}


def what_hash(recipe: BaseModel) -> str:
    """SHA-256 in hexadecimal of the canonical JSON (sorted keys, no blanks) of `hashed_settings`."""
    canonical = json.dumps(hashed_settings(recipe), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def name_and_hash(recipe: RecipeHeader) -> dict[str, str]:
    """The recipe's name and hash, for the document of `--plan`."""
    return {"recipe": recipe.name, "what_hash": what_hash(recipe)}


def differing_keys(first: BaseModel, second: BaseModel) -> list[tuple[str, Any, Any]]:
    """The dotted keys of `hashed_settings` that differ, with the first's and the second's value (or ABSENT)."""
    return differing_values(hashed_settings(first), hashed_settings(second))


def differing_values(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The same for settings as JSON data."""
    # If only the order of named items differs, the flat forms are equal but the top-level values are not.
    return _unequal(_flat(a), _flat(b)) or _unequal(a, b)


def differences_document(differing: Sequence[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    """Differing keys as JSON data: `[{"key", "a", "b"}, ...]`."""

    def plain(value: Any) -> Any:
        return value if value is None or isinstance(value, bool | int | float | str | list | dict) else str(value)

    return [{"key": key, "a": plain(a), "b": plain(b)} for key, a, b in differing]


def require_same_result(recorded: BaseModel, wanted: BaseModel, run: Path) -> None:
    """Refuse to resume a run with a recipe that gives a different result.

    Args:
        recorded: the run's recipe.
        wanted: the recipe of the command.
        run: the run's directory, for the message.

    Raises:
        UsageError: they differ; the keys are listed.
    """
    differing = differing_keys(recorded, wanted)
    if differing:
        lines = [f"  {key}: the run has {_as_written(old)}, now {_as_written(new)}" for key, old, new in differing]
        raise UsageError(
            f"{run}: cannot resume with a recipe that gives another result:\n"
            + "\n".join(lines)
            + "\nundo these, or start a new run without --resume"
        )


def _as_written(value: Any) -> str:
    """A value as a recipe has it: null, true and false, everything else as Python shows it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _unequal(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    pairs = [(key, a.get(key, ABSENT), b.get(key, ABSENT)) for key in sorted({*a, *b})]
    return [(key, x, y) for key, x, y in pairs if x != y]


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key to value; an item of a list of single-key mappings is written by its key, other lists are values."""
    if isinstance(data, list) and data and all(isinstance(item, dict) and len(item) == 1 for item in data):
        order = [next(iter(item)) for item in data]
        if len(set(order)) == len(order):
            data = {key: value for item in data for key, value in item.items()}
    if isinstance(data, dict) and data:
        parts = (_flat(value, f"{prefix}{key}.") for key, value in data.items())
        return {key: value for part in parts for key, value in part.items()}
    return {prefix.removesuffix("."): data}
