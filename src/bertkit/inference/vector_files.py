"""Vectors written block by block into .npy, Parquet or Arrow; an interrupted run can be continued.

Formats: numpy's NEP 1 for .npy; Apache Parquet; Arrow's IPC file (`.arrow`), both with the columns `id` and
`embedding`. Sibling sparse_vectors.py has the formats of sparse vectors.

Shapes: N vectors, F numbers stored per vector.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from bertkit.errors import UsageError
from bertkit.files import open_to_write, replacing
from bertkit.inference.part_files import PartFiles
from bertkit.stores.url import SCHEMES

FileForm = Literal["npy", "parquet", "arrow"]
Form = TypeVar("Form")
FORMS: dict[str, FileForm] = {".npy": "npy", ".parquet": "parquet", ".arrow": "arrow"}
HEADER_BYTES = 128
_ROWS_AT_ONCE = 8192
"""Rows per row group."""


def form_of_output(out: Path, forms: Mapping[str, Form]) -> Form:
    """The format of a file that a command writes, by its ending.

    Raises:
        UsageError: the ending is none of the known ones.
    """
    if out.suffix not in forms:
        raise UsageError(f"--out {out}: its ending is none of {', '.join(forms)}; name the file by its format")
    return forms[out.suffix]


def require_output(out: Path, *inputs: Path | None) -> None:
    """Refuse a path that a command cannot write to, before it computes anything.

    Raises:
        UsageError: it is on a store, the directory does not exist, the path is a directory, or it is one of the inputs.
    """
    scheme = str(out).partition(":/")[0]  # a path has lost one of the slashes
    if scheme in SCHEMES and str(out) != scheme:
        raise UsageError(f"--out {scheme}://...: the file is written to a local directory; give one, and copy the file")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: the directory {out.parent} does not exist; create it")
    if out.is_dir():
        raise UsageError(f"--out {out}: is a directory; name a file in it")
    if any(path is not None and path.exists() and out.exists() and path.samefile(out) for path in inputs):
        raise UsageError(f"--out {out}: is read by this command; name another file")


class VectorFile(PartFiles):
    """A file of dense vectors that is being written.

    Args:
        out: its final name.
        dtype: numpy's type of the stored numbers.
        width: F.
        key: see `PartFiles`.
        resumable: see `PartFiles`.
    """

    def __init__(self, out: Path, dtype: Any, width: int, key: Mapping[str, Any], *, resumable: bool = True) -> None:
        self.form = form_of_output(out, FORMS)
        self._dtype, self._width = np.dtype(dtype), width
        super().__init__(out, key, others=["ids"], header_bytes=HEADER_BYTES, resumable=resumable)

    def append(self, ids: Sequence[str], rows_NF: NDArray[Any], notes: Mapping[str, Any]) -> None:
        """Write a block.

        Args:
            ids: of its rows; a .npy file stores none.
            rows_NF: in stored form.
            notes: information needed to continue.
        """
        contents = {"": np.ascontiguousarray(rows_NF, dtype=self._dtype).tobytes()}
        if self.form != "npy":
            contents["ids"] = "".join(f"{json.dumps(each)}\n" for each in ids).encode()
        self.write(len(rows_NF), contents, notes)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Give the complete file its name.

        Args:
            metadata: of the schema, for Parquet and Arrow.
        """
        if self.form == "npy":
            with open_to_write(self.part, "r+b") as file:
                file.write(npy_header(self._dtype, (self.rows, self._width)))
            self.rename()
        else:
            with self.finishing():
                self._write_table(metadata)

    def _write_table(self, metadata: Mapping[str, str]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        numbers = pa.list_(pa.from_numpy_dtype(self._dtype), self._width)
        schema = pa.schema([("id", pa.string()), ("embedding", numbers)], metadata=dict(metadata))
        with replacing(self.out) as file:
            writer = (
                parquet.ParquetWriter(file, schema)
                if self.form == "parquet"
                else pa.ipc.new_file(pa.PythonFile(file, mode="w"), schema)
            )
            with writer:
                for ids, rows_nF in self._blocks():
                    flat = pa.array(rows_nF.reshape(-1))
                    columns = [pa.array(ids, pa.string()), pa.FixedSizeListArray.from_arrays(flat, type=numbers)]
                    writer.write_batch(pa.record_batch(columns, schema=schema))

    def _blocks(self) -> Iterator[tuple[list[str], NDArray[Any]]]:
        with self.part.open("rb") as file, self.path("ids").open(encoding="utf-8") as names:
            file.seek(HEADER_BYTES)
            for first in range(0, self.rows, _ROWS_AT_ONCE):
                count = min(_ROWS_AT_ONCE, self.rows - first)
                rows = np.frombuffer(file.read(count * self._width * self._dtype.itemsize), dtype=self._dtype)
                yield [json.loads(names.readline()) for _ in range(count)], rows.reshape(count, self._width)


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The first 128 bytes of a .npy file, whose rows follow."""
    buffer = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, described)
    header = buffer.getvalue()
    assert len(header) == HEADER_BYTES
    return header
