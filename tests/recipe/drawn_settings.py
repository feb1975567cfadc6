"""Random settings for the property test of keys: a recipe, and the same with one key changed.

The keys are read from the recipe itself, so a new one is drawn without a change here. `DOMAINS` has values for keys
that are not plain numbers, choices or switches, and for those whose effect a small run shows only at some values.
"""

from __future__ import annotations

import random
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from bertkit.errors import UsageError
from bertkit.recipe.hashing import NOT_DECIDING, what_hash
from bertkit.recipe.named_item import NamedItem
from bertkit.recipe.resolve import Override, with_overrides
from bertkit.settings import Settings

Change = tuple[str, Any]
"""A dotted key and its new value."""
_KINDS = ("family", "name", "kind", "type")
"""Keys that select a class, which are changed together with their siblings."""


def keys_of(settings: Settings, prefix: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    """The dotted keys that decide a recipe's result, with field and value; sections too."""
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        if not prefix and name in NOT_DECIDING:
            continue
        key = f"{prefix}{name}"
        if not (name in _KINDS and get_origin(info.annotation) is Literal):
            yield key, info, value
        if isinstance(value, NamedItem):
            continue
        if isinstance(value, Settings):
            yield from keys_of(value, f"{key}.")
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                if isinstance(item, NamedItem):
                    yield from keys_of(item.chosen, f"{key}.{item.name}.")
                elif isinstance(item, Settings):
                    yield from keys_of(item, f"{key}.{number}.")


def changed(
    recipe: Any, generator: random.Random, domains: Mapping[str, Any], left_out: Mapping[str, str]
) -> tuple[str, Any] | None:
    """A key, and the recipe with another value for it; None if the drawn value is invalid or there is no other."""
    keys = [(key, info, value) for key, info, value in keys_of(recipe) if not _among(key, left_out)]
    key, info, value = generator.choice(keys)
    known = _among(key, domains)
    values = domains[known] if known else list(_values(info.annotation, value, generator))
    values = values(recipe) if callable(values) else values
    if not values:
        return None
    try:
        found = with_overrides(recipe, [Override(key, generator.choice(values))])
    except UsageError:
        return None
    return (key, found) if what_hash(found) != what_hash(recipe) else None


def _among(key: str, names: Mapping[str, Any]) -> str | None:
    """The longest name that this key equals or ends with."""
    found = [name for name in names if key == name or key.endswith(f".{name}")]
    return max(found, key=len, default=None)


def _values(annotation: Any, value: Any, generator: random.Random) -> Iterator[Any]:
    """Other values of a switch, a choice or a number; validation refuses those out of range."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from [None] if part is type(None) else _values(part, value, generator)
    elif origin is Literal:
        yield from get_args(annotation)
    elif annotation is bool:
        yield from (True, False)
    elif annotation is int:
        start = value if isinstance(value, int) and not isinstance(value, bool) else 4
        yield from (0, 1, start + 1, start + 2, start * 2, max(1, start // 2))
    elif annotation is float:
        start = value if isinstance(value, int | float) and value else 0.3
        yield from (0.0, 1.0, start / 2, start * 2, start * 1.25, 0.5)


def value_at(settings: Any, key: str) -> Any:
    """The value at a dotted key."""
    for name in key.split("."):
        if isinstance(settings, list | tuple):
            named = {item.name: item.chosen for item in settings if isinstance(item, NamedItem)}
            settings = named[name] if name in named else settings[int(name)]
        else:
            settings = settings[name] if isinstance(settings, dict) else getattr(settings, name)
    return settings


def is_default(settings: Any, key: str) -> bool:
    """Whether the value at a dotted key is the field's default."""
    section, _, name = key.rpartition(".")
    owner = value_at(settings, section) if section else settings
    return bool(getattr(owner, name) == type(owner).model_fields[name].get_default(call_default_factory=True))
