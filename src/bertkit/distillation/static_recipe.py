"""Recipes for static embeddings: a teacher, and how the table of token vectors is made from it.

model2vec (Tulkens and van Dongen 2024); the method is in static_table.py. It is a recipe of kind `distill` with a
section `static`, and trains nothing; the recipes that train are text_recipe.py and task_recipe.py.

    kind: distill
    teacher: sentence-transformers/all-MiniLM-L6-v2
    static: {width: 256, sif: 1.0e-4}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from bertkit.distillation.static_table import StaticTable
from bertkit.errors import DataError, UsageError
from bertkit.files import sha256_of
from bertkit.finetuning.arguments import absolute
from bertkit.models.files.model_files import encoder_directory, find_model, weights_hash
from bertkit.recipe.header import RecipeHeader
from bertkit.recipe.resolve import Override, load_as, with_overrides
from bertkit.run.directory import RECIPE, RunDirectory
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.run import RunArguments

SECTION = "static"
"""The key that marks a recipe of kind `distill` as one of these."""


class StaticRecipe(RecipeHeader):
    """A table of token vectors from one teacher."""

    kind: Literal["distill"] = Field("distill", description="The command that runs the recipe.")
    teacher: str | None = Field(
        None,
        description="Encoder to distil, ideally a sentence embedder: a Hub id, a model directory or a run directory.",
    )
    static: StaticTable = Field(StaticTable(), description="How the table is computed.")


@dataclass(frozen=True)
class StaticArguments(RunArguments[StaticRecipe]):
    """The command line's arguments.

    Attributes:
        teachers: the model, instead of the recipe's.
    """

    teachers: Sequence[str] = ()

    kind: ClassVar[str] = "distill"

    def requested(self) -> StaticRecipe:
        """The recipe with the command line's teacher, all paths absolute.

        Raises:
            UsageError: errors in the recipe, several teachers or none.
        """
        assert self.recipe is not None
        if len(self.teachers) > 1:
            raise UsageError("--teacher: a table of token vectors is made from a single model; name one teacher")
        named = [Override("teacher", name, f"--teacher {name}") for name in self.teachers]
        recipe = load_as(StaticRecipe, self.recipe, [*named, *self.overrides])
        if recipe.teacher is None:
            raise UsageError("teacher: missing; name the encoder from which the table is made: --teacher MODEL")
        update: dict[str, Any] = {"teacher": absolute(recipe.teacher)}
        if recipe.static.text is not None:
            text = str(Path(recipe.static.text).expanduser().absolute())
            update["static"] = recipe.static.model_copy(update={"text": text})
        return recipe.model_copy(update=update)

    def recorded(self, run: RunDirectory) -> StaticRecipe:
        return load_as(StaticRecipe, str(run.path / RECIPE))

    def changed(self, recorded: StaticRecipe) -> StaticRecipe:
        return with_overrides(recorded, self.overrides)

    def fingerprints(self, recipe: StaticRecipe) -> dict[str, str | None]:
        """Fingerprints of the teacher's weights, its tokenizer, and the text from which whole words are taken.

        Raises:
            DataError: there is no such model or file.
        """
        assert recipe.teacher is not None
        files = encoder_directory(find_model(recipe.teacher, offline=self.offline))
        text = recipe.static.text
        if text is not None and not Path(text).is_file():
            raise DataError(f"static.text: {text}: there is no such file; check the path")
        return {
            "data": None if text is None else sha256_of(Path(text)),
            "tokenizer": load_tokenizer(files, offline=self.offline).fingerprint,
            "model": weights_hash(files),
        }
