"""The numbers of a vector: truncated, normalised, and stored in fewer bits, each vector independently.

Kusupati et al. 2022, Matryoshka representation learning, arXiv:2205.13147 (the first numbers are a vector, too).
sentence-transformers' `quantize_embeddings` has the same types, but its int8 takes the range of each dimension from the
other vectors of the call; here the numbers of a vector depend on that vector alone.

Shapes: N vectors, E width, F numbers stored per vector.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertkit.arrays import Float32Array
from bertkit.errors import UsageError
from bertkit.inference.embed_settings import EmbedSettings, VectorType

STORED: dict[VectorType, Any] = {"float32": np.float32, "bf16": np.uint16, "int8": np.int8, "binary": np.uint8}
"""numpy's types for storage: numpy has no bfloat16, whose numbers are the upper halves of float32's."""
_LARGEST = 127


def check_width(settings: EmbedSettings, width: int, name: str) -> int:
    """The width of the finished vectors.

    Raises:
        UsageError: --truncate exceeds the width.
    """
    if settings.truncate is not None and settings.truncate > width:
        raise UsageError(
            f"--truncate {settings.truncate}: the vectors of {name} have {width} numbers; give at most that many"
        )
    return settings.truncate or width


def stored_width(dtype: VectorType, width: int) -> int:
    """F: one byte per eight numbers for binary vectors, else one number each."""
    return -(-width // 8) if dtype == "binary" else width


def finished(vectors_NE: Float32Array, settings: EmbedSettings) -> Float32Array:
    """Truncated, then normalised; a vector of zeros stays one."""
    vectors_NE = vectors_NE[:, : settings.truncate]
    return normalised(vectors_NE) if settings.normalise else vectors_NE


def normalised(vectors_NE: Float32Array) -> Float32Array:
    """Each vector scaled to unit length, except zeros."""
    squares_NE = np.square(vectors_NE, dtype=np.float64)
    length_N1 = np.sqrt(squares_NE.sum(axis=1, keepdims=True))
    return np.asarray(vectors_NE / np.maximum(length_N1, 1e-12), dtype=np.float32)


def stored(vectors_NE: Float32Array, dtype: VectorType) -> NDArray[Any]:
    """The numbers in stored form, (N, F).

    int8: scaled so that the greatest number of each vector is 127; this keeps the direction and loses the length.
    binary: whether each number is above 0, eight to a byte, the first one highest (`numpy.packbits`).
    """
    if dtype == "bf16":
        rounded = torch.from_numpy(np.ascontiguousarray(vectors_NE)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)
    if dtype == "int8":
        peak_N1 = np.abs(vectors_NE).max(axis=1, keepdims=True).astype(np.float64)
        return np.rint(vectors_NE / np.where(peak_N1 > 0, peak_N1, 1.0) * _LARGEST).astype(np.int8)
    if dtype == "binary":
        return np.packbits(vectors_NE > 0, axis=1)
    return vectors_NE


def as_numbers(stored_NF: NDArray[Any], dtype: VectorType) -> NDArray[Any]:
    """Stored vectors as numbers for JSON; only bf16 is converted."""
    if dtype == "bf16":
        return (stored_NF.astype(np.uint32) << 16).view(np.float32)
    return stored_NF
