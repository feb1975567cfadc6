"""All surfaces through which input reaches bertkit."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.surfaces.base import Surface as Surface
from tests.fuzz.surfaces.commands import command_lines
from tests.fuzz.surfaces.models import models
from tests.fuzz.surfaces.readers import readers
from tests.fuzz.surfaces.recipes import recipes
from tests.fuzz.surfaces.runs import runs


def made_surfaces(home: Path) -> list[Surface]:
    """All surfaces; the files that they damage are written into `home`, a new directory."""
    home.mkdir(parents=True)
    return [
        *recipes(home / "recipes"),
        *readers(home / "readers"),
        *models(home / "models"),
        *runs(home / "runs"),
        command_lines(home / "commands"),
    ]
