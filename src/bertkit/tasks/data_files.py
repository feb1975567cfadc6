"""The package's own data, in YAML files next to this one: the tasks, and the figures that papers print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

if TYPE_CHECKING:  # importing pydantic takes 0.2 s, and the command line's help needs the titles of tasks
    from bertkit.settings import Settings

Entry = TypeVar("Entry", bound="Settings")

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times faster if PyYAML was built with libyaml."""


def read_data_file(name: str) -> Any:
    """The contents of a file of this package."""
    with Path(__file__).with_name(name).open(encoding="utf-8") as file:
        return yaml.load(file, _LOADER)


def plain(name: str) -> str:
    """A name without case and punctuation: `SST-2`, `sst_2` and `sst2` are the same."""
    return "".join(each for each in name.lower() if each.isalnum())


def validated(kind: type[Entry], entry: Any) -> Entry:
    """An entry as an object of its class; lists become tuples, as in recipes."""
    return kind.model_validate_json(json.dumps(entry))
