"""Figures that papers print for the tasks, from published.yaml; `bertkit eval` shows them next to its own.

The file names the papers. Sibling published_compression.py has the figures for compressed models.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Literal

from pydantic import Field

from bertkit.errors import UsageError
from bertkit.settings import Settings
from bertkit.tasks.data_files import read_data_file, validated


class PublishedRow(Settings):
    """One row of a table, in percent."""

    split: Literal["dev", "test"]
    figures: dict[str, dict[str, float]] = Field(description="By task and metric, by the names of bertkit's results.")
    source: str = Field(description="Where it is printed.")
    averages: dict[str, float] = Field({}, description="By the names of bertkit.evaluation.glue.AVERAGES, as printed.")
    note: str = Field("", description="What else to know.")


class PublishedModel(Settings):
    """A model with published rows."""

    name: str = Field(description="What `--published` calls it.")
    title: str = Field(description="Display name.")
    shape: tuple[str, int, int] = Field(description="model_type, layers and hidden size of config.json.")
    rows: tuple[PublishedRow, ...]
    pattern: str | None = Field(None, description="What a model's name must hold where another has the same shape.")


PUBLISHED: dict[str, PublishedModel] = {
    name: validated(PublishedModel, {"name": name, **entry}) for name, entry in read_data_file("published.yaml").items()
}
"""Every model with published rows, by name."""


def published_named(name: str) -> PublishedModel:
    """The model of that name.

    Raises:
        UsageError: there is none; the nearest name is given.
    """
    if name in PUBLISHED:
        return PUBLISHED[name]
    near = get_close_matches(name.lower(), PUBLISHED, n=1)
    hint = f"did you mean {near[0]}?" if near else f"one of: {', '.join(PUBLISHED)}; or none"
    raise UsageError(f"--published {name}: no published rows of this name; {hint}")


def published_for(shape: tuple[str, int, int], name: str) -> PublishedModel | None:
    """The model that a checkpoint most likely is: its shape must agree, and its name if several have this shape.

    Args:
        shape: model_type, layers and hidden size.
        name: the Hub id or path that the user gave.
    """
    of_shape = [model for model in PUBLISHED.values() if model.shape == shape]
    named = [model for model in of_shape if model.pattern and re.search(model.pattern, name.lower())]
    plain = [model for model in of_shape if model.pattern is None]
    return next(iter([*named, *plain]), None)
