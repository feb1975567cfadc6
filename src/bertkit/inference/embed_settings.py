"""Settings of `bertkit embed`: everything that determines the vectors besides model and texts.

Not from a paper. A separate file without torch, because command-line options are generated from it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

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
