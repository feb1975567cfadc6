"""The common part of all recipes: a header that describes the recipe, and a seed.

Not from a paper. Each capability's schema extends `RecipeHeader` with the sections it reads.
"""

from __future__ import annotations

from pydantic import Field

from bertkit.settings import Settings


class RecipeHeader(Settings):
    """Header and seed."""

    name: str = Field(
        pattern=r"^[\w.+-]+$",
        max_length=100,
        description="Name of the run's directory; by default the file's name. Never inherited.",
    )
    kind: str = Field(description="The command that runs the recipe.")
    title: str = Field("", description="One line for `bertkit recipes list`.")
    paper: str | None = Field(None, description="Authors, year, and where in the paper the values are.")
    arxiv: str | None = Field(
        None, pattern=r"^([a-z-]+/\d{7}|\d{4}\.\d{4,5})$", description="The paper's arXiv id, in quotes."
    )
    table: str | None = Field(None, description="Table of the paper that the run's figures are compared with.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed for all randomness.")
