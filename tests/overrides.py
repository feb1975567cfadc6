"""Overrides of recipes, written in tests as the text of `--set`."""

from __future__ import annotations

from collections.abc import Iterable

from bertkit.recipe.resolve import Override


def parsed(texts: Iterable[str | Override]) -> list[Override]:
    """`KEY=VALUE` as parsed by the command line; an override is returned unchanged."""
    return [Override.parse(each) if isinstance(each, str) else each for each in texts]
