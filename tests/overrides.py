"""Overrides of recipes as tests write them: the texts of `--set`."""

from __future__ import annotations

from collections.abc import Iterable

from bertkit.recipe.resolve import Override


def parsed(texts: Iterable[str | Override]) -> list[Override]:
    """`KEY=VALUE` as the command line parses it; what is an override already stays as it is."""
    return [Override.parse(each) if isinstance(each, str) else each for each in texts]
