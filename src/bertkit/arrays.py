"""Types of numpy arrays, named after the type of their numbers, and writing one."""

from __future__ import annotations

import os
from collections.abc import Iterable
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


def save_arrays(file: BinaryIO, **arrays: NDArray[Any]) -> None:
    """`numpy.savez`, which writes through the file's own `write`."""
    np.savez(file, allow_pickle=False, **arrays)


def save_rows(file: BinaryIO, parts: Iterable[NDArray[Any]]) -> int:
    """Write arrays one after another, with the bytes that `save_array` would write for all of them together.

    Args:
        file: open for writing at its start, and seekable.
        parts: at least one; equal but for the length of their first axis.

    Returns:
        The number of rows.
    """
    rows, header = 0, None
    for part in parts:
        if header is None:
            header = np.lib.format.header_data_from_array_1_0(part)
            np.lib.format.write_array_header_1_0(_OnlyWrites(file), header)
        file.write(part.tobytes())
        rows += len(part)
    assert header is not None
    file.seek(0)  # numpy leaves room in the header for any number of rows
    np.lib.format.write_array_header_1_0(_OnlyWrites(file), {**header, "shape": (rows, *header["shape"][1:])})
    file.seek(0, os.SEEK_END)
    return rows
