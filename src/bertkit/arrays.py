"""Types of numpy arrays, named after the type of their numbers, and writing one."""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]
Uint64Array = NDArray[np.uint64]
BoolArray = NDArray[np.bool_]


class _OnlyWrites:
    def __init__(self, file: BinaryIO) -> None:
        self.write = file.write


def save_array(file: BinaryIO, array: NDArray[Any]) -> None:
    """`numpy.save` through the file's own `write`, whose errors state their reason; numpy would write to the descriptor
    and report a full disk as "800 requested and 24 written"."""
    np.save(_OnlyWrites(file), array)
