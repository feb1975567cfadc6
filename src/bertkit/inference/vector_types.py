"""The numbers of a vector: truncated, normalised, and in fewer bits, each vector by itself.

Kusupati et al. 2022, Matryoshka representation learning, arXiv:2205.13147 (the first numbers are a vector, too).
sentence-transformers' `quantize_embeddings` has the same types, but its int8 takes the range of each dimension from the
other vectors of the call; here a vector's numbers depend on the vector alone.

Shapes: N vectors, E width, F numbers that are stored of one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertkit.errors import UsageError
from bertkit.inference.embed_settings import EmbedSettings, VectorType

Floats = NDArray[np.float32]

STORED: dict[VectorType, Any] = {"float32": np.float32, "bf16": np.uint16, "int8": np.int8, "binary": np.uint8}
"""What numpy stores: it has no bfloat16, whose numbers are the upper halves of float32's."""
_LARGEST = 127


def check_width(settings: EmbedSettings, width: int, name: str) -> int:
    """The width of the finished vectors.

    Raises:
        UsageError: more numbers are to be kept than there are.
    """
    if settings.truncate is not None and settings.truncate > width:
        raise UsageError(f"--truncate {settings.truncate}: the vectors of {name} have {width} numbers")
    return settings.truncate or width


def stored_width(dtype: VectorType, width: int) -> int:
    """F: of binary vectors a byte for eight numbers, else one for each."""
    return -(-width // 8) if dtype == "binary" else width


def finished(vectors_NE: Floats, settings: EmbedSettings) -> Floats:
    """Truncated, then normalised; a vector of zeros stays one."""
    vectors_NE = vectors_NE[:, : settings.truncate]
    return normalised(vectors_NE) if settings.normalise else vectors_NE


def normalised(vectors_NE: Floats) -> Floats:
    """Each at length one, but for zeros."""
    squares_NE = np.square(vectors_NE, dtype=np.float64)
    length_N1 = np.sqrt(squares_NE.sum(axis=1, keepdims=True))
    return np.asarray(vectors_NE / np.maximum(length_N1, 1e-12), dtype=np.float32)


def stored(vectors_NE: Floats, dtype: VectorType) -> NDArray[Any]:
    """The numbers as they are stored, (N, F).

    int8: scaled so that the greatest number of each vector is 127, which keeps the direction and loses the length.
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
    """The same for JSON: bf16 as numbers."""
    if dtype == "bf16":
        return (stored_NF.astype(np.uint32) << 16).view(np.float32)
    return stored_NF
