"""The base of every configuration object.

A configuration stands beside the class that it builds, is frozen, and refuses unknown keys. A field's description is
its help on the command line and its entry in the reference, so what None or an empty list means stands in it in
parentheses: "Pairs of each paradigm (default: all)."
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen settings; an unknown key or a wrong type is an error, and no type is silently converted to another."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())
