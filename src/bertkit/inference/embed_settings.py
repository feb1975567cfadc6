"""Settings of `bertkit embed`: what decides the vectors beside model and texts.

Own design. A file of its own, without torch, because command-line options are generated from it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bertkit.settings import Settings

VectorType = Literal["float32", "bf16", "int8", "binary"]


class EmbedSettings(Settings):
    """How a text becomes a vector, and how its numbers are stored."""

    dtype: VectorType = Field(
        "float32",
        description="Numbers of a vector: float32; bf16; int8, each vector scaled to its own greatest number; binary,"
        " a bit each.",
    )
    truncate: int | None = Field(
        None, ge=1, description="Keep this many of a vector's first numbers, as of a Matryoshka model (default: all)."
    )
    long: Literal["error", "cut", "window"] = Field(
        "cut",
        description="Texts longer than the model reads: an error, cut at the end, or the mean over windows of the whole"
        " text.",
    )
    max_length: int | None = Field(
        None, ge=8, description="Tokens of the longest sequence, special tokens included (default: the model's)."
    )
    normalise: bool = Field(False, description="Scale each vector to length one, after it is truncated.")
