"""Lists of named things in a recipe, each written as a mapping with one key: `masked_lm: {rate: 0.15}`.

Nothing here follows a paper. Objectives are written so (schema.py), and the terms of distillation (distill.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from pydantic import model_serializer, model_validator

from bertkit.settings import Settings


class OneKey(Settings):
    """One of several things with its settings. A subclass has an optional field for each; pydantic then locates every
    fault inside it by its name."""

    what: ClassVar[str]
    """What it is one of, for messages."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, data: Any) -> Any:
        """`- next_sentence` and `- next_sentence:` both mean its defaults."""
        if isinstance(data, str):
            return {data: {}}
        if isinstance(data, dict):
            return {name: {} if settings is None else _with_tuples(settings) for name, settings in data.items()}
        return data

    @model_validator(mode="after")
    def _exactly_one(self) -> OneKey:
        if len(self.model_fields_set) != 1:
            raise ValueError(f"each item of the list is one {self.what}: `- name: {{settings}}`")
        return self

    @property
    def name(self) -> str:
        """Which one it is."""
        (name,) = self.model_fields_set
        return name

    @property
    def chosen(self) -> Any:
        """Its settings."""
        return getattr(self, self.name)

    @model_serializer(mode="plain")
    def _as_written(self) -> dict[str, Any]:
        return {self.name: self.chosen.model_dump(mode="json")}


def _with_tuples(data: Any) -> Any:
    """JSON's lists as tuples: behind a validator of its own, pydantic no longer takes one for the other."""
    if isinstance(data, dict):
        return {key: _with_tuples(value) for key, value in data.items()}
    return tuple(map(_with_tuples, data)) if isinstance(data, list) else data


def check_each_once(items: Sequence[OneKey], kind: type[OneKey], known: Iterable[str]) -> None:
    """Check a list.

    Args:
        items: of it.
        kind: what they are.
        known: all that there are.

    Raises:
        ValueError: it is empty, or has one of them twice.
    """
    # No min_length on the field: pydantic then reports a list whose items are at fault as empty, too.
    if not items:
        raise ValueError(f"needs at least one {kind.what} of: {', '.join(known)}")
    names = [each.name for each in items]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        article = "an" if kind.what[0] in "aeiou" else "a"
        raise ValueError(f"{', '.join(twice)} is listed twice; {article} {kind.what} counts once, with its `weight`")
