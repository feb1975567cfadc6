"""Writes a resolved recipe as YAML that this package's reader reads back as an equal one.

Not from a paper. Sibling resolve.py reads.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import yaml
from pydantic import BaseModel

from bertkit.recipe.tree import plain_scalar
from bertkit.settings import EVERY_FIELD

_ONE_LINE = 100
"""Maximum length of a mapping that is written on one line."""


def dump_recipe(recipe: BaseModel, *, without: Collection[str] = (), every_field: bool = False) -> str:
    """The recipe as YAML: resolved, with keys in schema order; loading it gives an equal recipe, unless it is written
    without some of its keys.

    Args:
        recipe: what is written.
        without: keys that are left out.
        every_field: whether fields that runs of earlier versions do not have are written if they have their defaults.
    """
    data = recipe.model_dump(mode="json", exclude=set(without), context=EVERY_FIELD if every_field else None)
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120, indent=2
    )


class _Dumper(yaml.SafeDumper):
    """Quotes text that this package's reader would not read back as the same text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        """On one line if it fits, else one key per line."""
        node = super().represent_mapping(tag, mapping, flow_style)
        if node.flow_style and sum(len(key.value) + len(value.value) + 4 for key, value in node.value) > _ONE_LINE:
            node.flow_style = False
        return node


def _is_plain_text(text: str) -> bool:
    try:
        return isinstance(plain_scalar(text), str)
    except ValueError:
        return False


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if not text.isprintable() else None if _is_plain_text(text) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
