"""Figures that papers print for compressed models: how much smaller and faster, and the share of the score kept.

The rows are in published_compression.yaml, which names the papers. Sibling published.py has the scores of
uncompressed models.
"""

from __future__ import annotations

from difflib import get_close_matches

from pydantic import Field

from bertkit.errors import UsageError
from bertkit.settings import Settings
from bertkit.tasks.data_files import plain, read_data_file, validated

NO_METHOD = "none"
"""Option value in place of a method: show no published row."""


class PublishedCompression(Settings):
    """One row."""

    method: str = Field(description="A key of METHODS.")
    title: str = Field(description="Display name.")
    compression: float = Field(description="How many times smaller than `against`.")
    retention: float = Field(description="Share of the score of `against` that is left.")
    speed_up: float | None = Field(None, description="How many times faster than `against`; null: nothing is printed.")
    source: str = Field("overview of a lecture on BERT", description="Where it is printed.")
    against: str = Field("BERT base", description="What it is compared with.")
    layers: int | None = Field(None, description="Of the student, where a method has several rows.")
    width: int | None = Field(None, description="Likewise.")
    note: str = Field("", description="What the paper itself prints.")


COMPRESSIONS = tuple(validated(PublishedCompression, row) for row in read_data_file("published_compression.yaml"))
"""Every row, in the order of the methods."""

METHODS = tuple(dict.fromkeys(row.method for row in COMPRESSIONS))
"""Every method with rows."""

_OTHER_NAMES = {
    "bertpkd": "pkd",
    "patient": "pkd",
    "pretraineddistillation": "pd",
    "bertoftheseus": "theseus",
    "smallvocabulary": "zhao",
    "dualvocabulary": "zhao",
}


def method_named(name: str) -> str:
    """The method of this name, in any spelling: `Q-BERT`, `tinybert`.

    Raises:
        UsageError: there is none; the nearest name is given.
    """
    key = plain(name)
    found = key if key in METHODS else _OTHER_NAMES.get(key)
    if found is None:
        near = get_close_matches(key, METHODS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of: {', '.join(METHODS)}; or {NO_METHOD}"
        raise UsageError(f"--method {name}: no published rows of this method; {hint}")
    return found


def method_in(name: str) -> str | None:
    """The method that the name of a recipe begins with: `tinybert` for `tinybert-sst2`; None if there is none."""
    key = plain(name)
    known = {each: each for each in METHODS} | _OTHER_NAMES
    found = [prefix for prefix in known if key.startswith(prefix)]
    return known[max(found, key=len)] if found else None


def published_compression(method: str, *, layers: int | None, width: int | None) -> PublishedCompression:
    """The row of a method; if it has several, the one with the student nearest in layers, then in width.

    Args:
        method: one of METHODS.
        layers, width: of the model that it is shown next to; None if unknown.
    """

    def distance(row: PublishedCompression) -> tuple[int, int]:
        return _apart(row.layers, layers), _apart(row.width, width)

    return min((row for row in COMPRESSIONS if row.method == method), key=distance)


def _apart(one: int | None, other: int | None) -> int:
    return 0 if one is None or other is None else abs(one - other)
