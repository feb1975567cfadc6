"""Options of the kinds of `bertkit probe` whose options are not generated from their settings yet.

Nothing here follows a paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from bertkit.cli import options

Sentences = Annotated[
    int, typer.Option("--sentences", metavar="N", min=1, help="Sentences, drawn at random from the text.")
]


@dataclass(frozen=True)
class Probing(options.Probing):
    """With the seed."""

    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of all random choices.")] = 0
