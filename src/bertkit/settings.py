"""The base of every configuration object.

A settings class is in the file of the class that it builds, is frozen, and refuses unknown keys. A field's description
is its help on the command line and its entry in the reference, so it explains None or an empty list in
parentheses: "Pairs of each paradigm (default: all)."
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer, model_validator

LARGEST_WHOLE = 2**53


@dataclass(frozen=True)
class UnreadKey:
    """A key whose value changes nothing that is computed, given the other settings.

    Attributes:
        name: the field, dotted where it is nested; empty for all of the settings together.
        reason: why nothing reads it, as a clause.
        remedy: what to change, other than to leave the key out.
        refused: whether a new run is refused; else there is a warning, as where the command line replaced the setting
            that the key went with.
        told: whether there is a warning; none where a flag of its own asks for what leaves the key unread.
    """

    name: str
    reason: str
    remedy: str = ""
    refused: bool = True
    told: bool = True


class Settings(BaseModel):
    """Frozen settings; an unknown key, a wrong type, NaN or infinity is an error, and no type is silently converted to
    another."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False)

    later_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that runs of an earlier version do not have: left out where they have their default, so that such a run
    keeps the hash of its recipe."""

    @model_validator(mode="after")
    def _whole_numbers_are_bounded(self) -> Self:
        # Beyond this a float is not exact, and soon neither C nor torch can hold the number.
        for name in self.model_fields_set:
            value = getattr(self, name)
            if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
                raise ValueError(f"{name} is beyond {LARGEST_WHOLE:,}; choose a smaller number")
        return self

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return self.dumped(handler(self))

    def dumped(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields that a dump shows.

        Args:
            fields: all of them, as JSON or Python data.
        """
        known = type(self).model_fields
        unchanged = {
            name
            for name in self.later_fields
            if getattr(self, name) == known[name].get_default(call_default_factory=True)
        }
        return {name: value for name, value in fields.items() if name not in unchanged}

    def unread_keys(self, recipe: Any) -> Iterable[UnreadKey]:
        """The fields that nothing reads, given the others, whatever their values.

        Such a key would change the hash of a recipe and not its result; recipe/unread.py reports those that are set.

        Args:
            recipe: the whole that these settings are a part of, of a package above this one.
        """
        return ()
