"""Settings of `bertkit embed`: everything that determines the vectors besides model and texts.

Not from a paper. A separate file without torch, because command-line options are generated from it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

from pydantic import Field

from bertkit.errors import UsageError
from bertkit.settings import Settings

VectorType = Literal["float32", "bf16", "int8", "binary"]


class EmbedSettings(Settings):
    """How a text becomes a vector, and how its numbers are stored."""

    dtype: VectorType = Field(
        "float32",
        description="Number format of the vectors: float32; bf16; int8, each vector scaled by its own largest"
        " number; binary, one bit per number.",
    )
    truncate: int | None = Field(
        None, ge=1, description="Keep only the first DIM numbers of each vector, for Matryoshka models (default: all)."
    )
    long: Literal["error", "cut", "window"] = Field(
        "cut",
        description="How to treat texts longer than the model's maximum: error; cut (at the end); window (the mean"
        " over windows of the whole text).",
    )
    max_length: int | None = Field(
        None, ge=8, description="Maximum sequence length in tokens, including special tokens (default: the model's)."
    )
    normalise: bool = Field(False, description="Scale each vector to unit length, after truncation.")
    prompt: str | None = Field(
        None, description="Text to put before each text, as some models need it (default: the model's default prompt)."
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"prompt"})


def refuse_settings(settings: EmbedSettings, names: Collection[str], vectors: str) -> None:
    """Refuse settings that a model's kind of vectors does not have.

    Args:
        settings: as given.
        names: of `dtype`, `truncate`, `normalise` and `long`, those that are refused.
        vectors: what they are for, and what the model computes instead.

    Raises:
        UsageError: one of them is set.
    """
    is_set = {
        "dtype": settings.dtype != "float32",
        "truncate": settings.truncate is not None,
        "normalise": settings.normalise,
        "long": settings.long == "window",
    }
    given = ["--long window" if name == "long" else f"--{name}" for name in is_set if name in names and is_set[name]]
    if given:
        raise UsageError(f"{', '.join(given)}: for {vectors}; leave it out")
