"""Keys of a recipe that change its hash but nothing that is computed: found, then refused or reported in a warning.

Not from a paper. Each settings class lists its unread keys (`Settings.unread_keys`), next to the code that reads the
others. Here they are collected over a whole recipe, with its stages or the run before it: a key counts as read if any
part of the run reads it. It counts as set if removing it would change the recipe, that is, if its value differs from
the default and from that of the recipe this one extends. Sibling hashing.py has the hash.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from bertkit.errors import UsageError
from bertkit.recipe.errors import shown_value
from bertkit.recipe.hashing import NOT_DECIDING
from bertkit.recipe.named_item import NamedItem
from bertkit.settings import Settings, UnreadKey

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """A part of a run, and the recipe that applies to it.

    Attributes:
        recipe: with the settings of this part.
        changes: the dotted keys that the part sets differently from the recipe itself.
        where: of these changes, as a prefix of messages.
    """

    recipe: Settings
    changes: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class UnreadSetting:
    """A key that is set but never read.

    Attributes:
        key: dotted, as `--set` takes it.
        why: the key, its value, why nothing reads it, and what to change, in one line.
        refused: whether a new run is refused.
        told: whether there is a warning.
    """

    key: str
    why: str
    refused: bool = True
    told: bool = True


@dataclass(frozen=True)
class _Found:
    value: Any
    default: Any
    unread: UnreadKey = field(compare=False)


def unread_settings(
    recipe: Settings,
    parts: Sequence[Part] = (),
    *,
    inherited: Mapping[str, BaseModel] | None = None,
    base: Mapping[str, Any] | None = None,
    overridden: Collection[str] = (),
) -> list[UnreadSetting]:
    """The keys of a recipe that are set but never read.

    Args:
        recipe: resolved.
        parts: of its run, such as stages; none: the recipe is the only part.
        inherited: settings by section that the user did not write, such as those of an initial model under `model`; a
            value equal to the inherited one does not count as set.
        base: the recipe that it extends, as plain data.
        overridden: dotted keys set on the command line. A value that every stage replaces is allowed in a recipe, where
            it applies to a run without the stages; on the command line it is a mistake.
    """
    parts = parts or [Part(recipe)]
    inherited = inherited or {}
    found = [dict(_unread(part.recipe, inherited)) for part in parts]
    everywhere = _unread_in_all(recipe, parts, found, overridden)
    settings = [
        _described(key, one)
        for key, one in everywhere.items()
        if key.partition(".")[0] not in NOT_DECIDING and not _equals(one.value, _plain_at(base, key))
    ]
    for part, own in zip(parts, found, strict=True):
        if part.where and _equals(_at(recipe, part.where), _plain_at(base, part.where)):
            continue
        settings += [
            _described(key, one, part.where)
            for key, one in own.items()
            if key not in everywhere and any(is_within(key, change) for change in part.changes)
        ]
    return settings


def refuse_unread(settings: Sequence[UnreadSetting], name: str) -> None:
    """Raise UsageError for the refused keys, all at once, and warn of the others."""
    warn_unread([each for each in settings if not each.refused])
    refused = [each.why for each in settings if each.refused]
    if refused:
        count = "a key" if len(refused) == 1 else f"{len(refused)} keys"
        raise UsageError("\n  ".join([f"{name} has {count} without effect:", *refused]))


def warn_unread(settings: Sequence[UnreadSetting]) -> None:
    """One warning for each key."""
    for each in settings:
        if each.told:
            log.warning("%s", each.why)


def _unread(recipe: Settings, inherited: Mapping[str, BaseModel]) -> Iterator[tuple[str, _Found]]:
    """The set but unread keys in one part of a run, by dotted key."""

    def of(settings: Settings, prefix: str) -> Iterator[tuple[str, _Found]]:
        other = inherited.get(prefix)
        whole = set()
        for unread in settings.unread_keys(recipe):
            if not unread.name:
                yield prefix, _Found(settings, None, unread)
                return
            whole.add(unread.name)
            value, default = _at(settings, unread.name), _default_at(settings, unread.name)
            if value not in (default, getattr(other, unread.name, default)):
                yield f"{prefix}.{unread.name}" if prefix else unread.name, _Found(value, default, unread)
        for name, value in settings:
            if name not in whole:
                for key, child in _children(value, f"{prefix}.{name}" if prefix else name):
                    yield from of(child, key)

    return of(recipe, "")


def _children(value: Any, key: str) -> Iterator[tuple[str, Settings]]:
    """The settings inside a value; items of a list by name or number."""
    if isinstance(value, NamedItem):
        yield f"{key}.{value.name}", value.chosen
    elif isinstance(value, Settings):
        yield key, value
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _children(item, key if isinstance(item, NamedItem) else f"{key}.{number}")


def _unread_in_all(
    recipe: Settings, parts: Sequence[Part], found: Sequence[Mapping[str, _Found]], overridden: Collection[str]
) -> dict[str, _Found]:
    """The recipe's own settings that no part reads, because each part leaves them unread or replaces them."""

    def is_read(key: str) -> bool:
        pairs = zip(parts, found, strict=True)
        return any(key not in own and not any(is_within(key, change) for change in part.changes) for part, own in pairs)

    own = {key: one for each in found for key, one in each.items() if _at(recipe, key) == one.value}
    replaced = UnreadKey("", "every stage has a value of its own for it", "change it in optimisation.stages")
    for key in overridden:
        if key not in own:
            own[key] = _Found(_at(recipe, key), PydanticUndefined, replaced)
    return {key: one for key, one in own.items() if not is_read(key)}


def _described(key: str, found: _Found, where: str = "") -> UnreadSetting:
    unread = found.unread
    is_plain = not isinstance(found.value, Settings | list | tuple)
    value = f" ({shown_value(found.value)})" if is_plain else ""
    remedies = ["leave it out"]
    if is_plain and not isinstance(found.default, Settings) and found.default is not PydanticUndefined:
        remedies.append(f"write its default, {shown_value(found.default)}")
    remedies += [unread.remedy] if unread.remedy else []
    place = f"{where}: " if where else ""
    why = f"{place}{key}{value} has no effect: {unread.reason}; {', or '.join(remedies)}"
    return UnreadSetting(key, why, unread.refused, unread.told)


def is_within(key: str, section: str) -> bool:
    """Whether a dotted key is a section or one of its keys."""
    return key == section or key.startswith(f"{section}.")


_MISSING = object()


def _at(settings: Any, key: str) -> Any:
    """The value at a dotted key; `_MISSING` if there is none."""
    for name in key.split("."):
        if isinstance(settings, list | tuple):
            items = {item.name: item.chosen for item in settings if isinstance(item, NamedItem)}
            items |= {str(number): item for number, item in enumerate(settings)}
            settings = items.get(name, _MISSING)
        else:
            settings = getattr(settings, name, _MISSING)
    return settings


def _plain_at(data: Any, key: str) -> Any:
    """The same for plain data, in which an item of a list is a mapping with its name as the only key."""
    for name in key.split("."):
        if isinstance(data, list):
            items = {str(number): item for number, item in enumerate(data)}
            for item in data:
                items |= item if isinstance(item, dict) else {str(item): {}}
            data = items
        data = data.get(name, _MISSING) if isinstance(data, Mapping) else _MISSING
    return data


def _equals(value: Any, plain: Any) -> bool:
    """Whether plain data represent this value."""
    if isinstance(value, Settings):
        try:
            return isinstance(plain, Mapping) and type(value).model_validate_json(json.dumps(plain)) == value
        except ValidationError:
            return False
    return bool(plain == (list(value) if isinstance(value, tuple) else value))


def _default_at(settings: Any, key: str) -> Any:
    """The default of a dotted key."""
    section, _, name = key.rpartition(".")
    owner = _at(settings, section) if section else settings
    info = type(owner).model_fields.get(name) if isinstance(owner, BaseModel) else None
    return _MISSING if info is None else info.get_default(call_default_factory=True)
