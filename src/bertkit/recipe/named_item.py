"""Lists of named items in a recipe, each written as a mapping with one key: `masked_lm: {rate: 0.15}`.

Not from a paper. Objectives and the terms of distillation are written this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from pydantic import SerializationInfo, model_serializer, model_validator

from bertkit.settings import Settings


class NamedItem(Settings):
    """One of several kinds of settings, chosen by name.

    A subclass has an optional field for each kind, so that pydantic reports every error with the item's name.
    """

    what: ClassVar[str]
    """What the items are, for messages."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, data: Any) -> Any:
        """`- next_sentence` and `- next_sentence:` both mean the item with its defaults."""
        if isinstance(data, str):
            return {data: {}}
        if isinstance(data, dict):
            return {name: {} if settings is None else _with_tuples(settings) for name, settings in data.items()}
        return data

    @model_validator(mode="after")
    def _exactly_one(self) -> NamedItem:
        if len(self.model_fields_set) != 1:
            raise ValueError(f"each item of the list is one {self.what}: `- name: {{settings}}`")
        return self

    @property
    def name(self) -> str:
        """The item's name."""
        (name,) = self.model_fields_set
        return name

    @property
    def chosen(self) -> Any:
        """The item's settings."""
        return getattr(self, self.name)

    @model_serializer(mode="plain")
    def _as_written(self, info: SerializationInfo) -> dict[str, Any]:
        return {self.name: self.chosen.model_dump(mode="json", context=info.context)}


def _with_tuples(data: Any) -> Any:
    """JSON lists as tuples: after a custom validator, pydantic no longer accepts lists for tuples."""
    if isinstance(data, dict):
        return {key: _with_tuples(value) for key, value in data.items()}
    return tuple(map(_with_tuples, data)) if isinstance(data, list) else data


def check_each_once(items: Sequence[NamedItem], kind: type[NamedItem], known: Iterable[str]) -> None:
    """Check a list of items of a kind, whose valid names are `known`.

    Raises:
        ValueError: the list is empty, or contains an item twice.
    """
    # No min_length on the field: pydantic would also report a list with invalid items as empty.
    if not items:
        raise ValueError(f"needs at least one {kind.what} of: {', '.join(known)}")
    names = [each.name for each in items]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        article = "an" if kind.what[0] in "aeiou" else "a"
        raise ValueError(f"{', '.join(twice)} is listed twice; {article} {kind.what} counts once, with its `weight`")
