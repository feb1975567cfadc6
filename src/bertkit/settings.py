"""The base of every configuration object.

A settings class is in the same file as the class that it builds, is frozen, and refuses unknown keys. A field's
description is its help on the command line and its entry in the reference, so it explains None or an empty list in
parentheses: "Pairs of each paradigm (default: all)."
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

LARGEST_WHOLE = 2**53
EVERY_FIELD = "every field"
"""The context of a dump for people: `later_fields` are included, too."""


@dataclass(frozen=True)
class UnreadKey:
    """A key that has no effect, given the other settings.

    Attributes:
        name: the field, dotted if it is nested; empty for all of the settings together.
        reason: why nothing reads it, as a clause.
        remedy: what to change, other than leaving the key out.
        refused: whether a new run is refused; else there is a warning, for example if the command line replaced the
            setting that the key belonged to.
        told: whether there is a warning; False if a command-line flag explicitly requests what leaves the key unread.
    """

    name: str
    reason: str
    remedy: str = ""
    refused: bool = True
    told: bool = True


class Settings(BaseModel):
    """Frozen settings; an unknown key, a wrong type, NaN or infinity is an error, and types are never silently
    converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False)

    later_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that runs of earlier versions do not have: left out if they have their default, so that such a run keeps
    the hash of its recipe."""

    @model_validator(mode="after")
    def _whole_numbers_are_bounded(self) -> Self:
        # Beyond this a float is not exact, and a little further neither C nor torch can represent the number.
        for name in self.model_fields_set:
            value = getattr(self, name)
            if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
                raise ValueError(f"{name} is larger than {LARGEST_WHOLE:,}; choose a smaller number")
        return self

    @model_serializer(mode="wrap")
    def _without_later_defaults(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        return self.dumped(handler(self), every_field=info.context == EVERY_FIELD)

    def dumped(self, fields: dict[str, Any], *, every_field: bool) -> dict[str, Any]:
        """The fields to include in a dump.

        Args:
            fields: all fields, as JSON or Python data.
            every_field: whether `later_fields` with their defaults are included.
        """
        if every_field:
            return fields
        later = _later_defaults(type(self))
        return {key: value for key, value in fields.items() if key not in later or getattr(self, key) != later[key]}

    def unread_keys(self, recipe: Any) -> Iterable[UnreadKey]:
        """The fields that nothing reads, given the other settings, for any value.

        Such a key would change the hash of a recipe but not its result; recipe/unread.py reports those that are set.

        Args:
            recipe: the recipe that contains these settings; its class is in a package above this one.
        """
        return ()


@cache
def _later_defaults(kind: type[Settings]) -> dict[str, Any]:
    """The defaults of `later_fields`; asking pydantic for each of them takes most of the time of a dump."""
    return {name: kind.model_fields[name].get_default(call_default_factory=True) for name in kind.later_fields}
