"""Token vectors (ColBERT) of a file of texts, written block by block: all rows in one array, and each text's first row.

Sibling sparse_vectors.py has the weights of words, vector_files.py one vector per text.

Shapes: N texts, M tokens of all texts, L tokens of a text, E width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertkit.arrays import Float32Array, Int64Array, save_array
from bertkit.errors import DataError
from bertkit.files import open_to_write, replacing
from bertkit.inference.embed_settings import EmbedSettings, refuse_settings
from bertkit.inference.part_files import PartFiles
from bertkit.inference.vector_files import HEADER_BYTES, npy_header


class TokenVectors:
    """The token vectors of texts, in memory or a memory map.

    Attributes:
        vector_ME: of all tokens, as they are stored.
        start_N: the first row of each text, and the number of all rows.
    """

    def __init__(self, vector_ME: NDArray[Any], start_N: Int64Array) -> None:
        self.vector_ME, self.start_N = vector_ME, start_N
        self.shape = (len(start_N) - 1, vector_ME.shape[1])

    @classmethod
    def read(cls, path: Path, *, count: int, width: int) -> TokenVectors:
        """A memory map of a file of `count` texts.

        Raises:
            DataError: it is damaged, or contains other vectors.
        """
        try:
            vector_ME, start_N = np.load(path, mmap_mode="r"), np.load(_starts_of(path))
        except (OSError, EOFError, ValueError) as error:
            raise DataError(f"{path}: is damaged ({error}); delete the directory and build the index again") from error
        if start_N.shape != (count + 1,) or vector_ME.shape != (start_N[-1], width):
            raise DataError(
                f"{path}: contains {len(vector_ME):,} vectors of {vector_ME.shape[-1]} numbers, which are not those of"
                f" the {count:,} texts next to it; delete the directory and build the index again"
            )
        return cls(vector_ME, start_N)

    def rows(self, chosen: slice | Int64Array) -> Float32Array:
        """Some of the vectors; those stored as int8 have unit length again."""
        found = np.ascontiguousarray(self.vector_ME[chosen], dtype=np.float32)
        if self.vector_ME.dtype == np.int8:
            found /= np.sqrt(np.maximum(np.einsum("me,me->m", found, found), 1))[:, None]
        return found

    def __getitem__(self, number: int) -> NDArray[Any]:
        """Of one text, (L, E), as they are stored."""
        return self.vector_ME[self.start_N[number] : self.start_N[number + 1]]


def check_token_settings(settings: EmbedSettings) -> None:
    """Refuse settings of one vector per text.

    Raises:
        UsageError: one of them is set.
    """
    vectors = "one vector per text, but the model computes one for each token (ColBERT)"
    refuse_settings(settings, ("truncate", "long"), vectors)


class TokenVectorFile(PartFiles):
    """A .npy file of token vectors that is being written, with one of the starts of texts next to it.

    Args:
        out: its final name.
        dtype: numpy's type of the stored numbers.
        width: E.
        key: see `PartFiles`.
        resumable: see `PartFiles`.
    """

    def __init__(self, out: Path, dtype: Any, width: int, key: Mapping[str, Any], *, resumable: bool = True) -> None:
        self._dtype, self._width = np.dtype(dtype), width
        super().__init__(out, key, others=["counts"], header_bytes=HEADER_BYTES, resumable=resumable)

    def append(self, ids: Sequence[str], texts_LE: Sequence[NDArray[Any]], notes: Mapping[str, Any]) -> None:
        """Write a block; `notes` are the information needed to continue."""
        contents = {
            "": b"".join(np.ascontiguousarray(each).tobytes() for each in texts_LE),
            "counts": np.array([len(each) for each in texts_LE], np.int64).tobytes(),
        }
        self.write(len(texts_LE), contents, notes)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Give the complete file its name; it has no metadata."""
        start_N = np.concatenate([[0], np.fromfile(self.path("counts"), np.int64).cumsum()])
        with replacing(_starts_of(self.out)) as file:
            save_array(file, start_N)
        with open_to_write(self.part, "r+b") as file:
            file.write(npy_header(self._dtype, (int(start_N[-1]), self._width)))
        self.rename()


def _starts_of(path: Path) -> Path:
    return path.with_suffix(".starts.npy")
