"""Vectors written block by block into .npy, Parquet or Arrow; an interrupted run can be continued.

Formats: numpy's NEP 1 for .npy; Apache Parquet; Arrow's IPC file (`.arrow`), both with the columns `id` and
`embedding`. Until the last block is written, the rows are in OUT.part and their description in OUT.part.json, so only
a complete file ever has the requested name.

Shapes: N vectors, F numbers stored per vector.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from bertkit.errors import DataError, UsageError
from bertkit.files import fsync_path, noting, open_text_to_write, open_to_write, read_json, replacing, write_json

log = logging.getLogger(__name__)

FileForm = Literal["npy", "parquet", "arrow"]
Form = TypeVar("Form")
FORMS: dict[str, FileForm] = {".npy": "npy", ".parquet": "parquet", ".arrow": "arrow"}
_HEADER_BYTES = 128
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
        UsageError: the directory does not exist, the path is a directory, or it is one of the inputs.
    """
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: the directory {out.parent} does not exist; create it")
    if out.is_dir():
        raise UsageError(f"--out {out}: is a directory; name a file in it")
    if any(path is not None and path.exists() and out.exists() and path.samefile(out) for path in inputs):
        raise UsageError(f"--out {out}: is read by this command; name another file")


class VectorFile:
    """A file of vectors that is being written.

    Args:
        out: its final name.
        dtype: numpy's type of the stored numbers.
        width: F.
        key: determines the rows; an unfinished file with a different key is started again.
        resumable: whether an unfinished file may be continued.

    Attributes:
        rows: of all blocks so far, including those of an earlier run.
        notes: the notes written with the last block.
    """

    def __init__(self, out: Path, dtype: Any, width: int, key: Mapping[str, Any], *, resumable: bool = True) -> None:
        self.out = out
        self.form = form_of_output(out, FORMS)
        self.rows = 0
        self.notes: dict[str, Any] = {}
        self._dtype, self._width, self._key = np.dtype(dtype), width, dict(key)
        self._part = out.with_name(f"{out.name}.part")
        self._ids = out.with_name(f"{out.name}.part.ids")
        self._state = out.with_name(f"{out.name}.part.json")
        self._resumable = resumable
        if resumable:
            self._continue()
        if not self.rows:
            self._begin()

    def _begin(self) -> None:
        self._state.unlink(missing_ok=True)
        with open_to_write(self._part) as file:
            file.write(b"\0" * _HEADER_BYTES)
        open_to_write(self._ids).close()

    def _continue(self) -> None:
        if not (self._state.is_file() and self._part.is_file() and self._ids.is_file()):
            return
        try:
            state = read_json(self._state)
        except DataError as fault:
            log.warning("%s; the file is written again from the start", fault)
            return
        if state.get("key") != json.loads(json.dumps(self._key)):
            log.warning("%s was begun with another model, input or other options; it is begun again", self._part)
            return
        rows, ids_bytes, notes = state.get("rows"), state.get("ids_bytes"), state.get("notes")
        if (
            not (isinstance(rows, int) and isinstance(ids_bytes, int) and isinstance(notes, dict))
            or self._part.stat().st_size < self._bytes(rows)
            or self._ids.stat().st_size < ids_bytes
        ):
            log.warning("%s is damaged; it is begun again", self._part)
            return
        os.truncate(self._part, self._bytes(rows))
        os.truncate(self._ids, ids_bytes)
        self.rows, self.notes = rows, notes

    def _bytes(self, rows: int) -> int:
        return _HEADER_BYTES + rows * self._width * int(self._dtype.itemsize)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """While blocks are written: after an error, files that cannot be continued are deleted."""
        try:
            yield
        except BaseException:
            if not self._resumable:
                self.discard()
            raise

    def append(self, ids: Sequence[str], rows_NF: NDArray[Any], notes: Mapping[str, Any]) -> None:
        """Write a block; once this returns, the block is never computed again.

        Args:
            ids: of its rows; a .npy file stores none.
            rows_NF: in stored form.
            notes: information needed to continue.
        """
        kept = f"the first {self.rows:,} vectors are kept, and the same command continues after them"
        with noting(kept) if self.rows and self._resumable else nullcontext():
            with open_to_write(self._part, "ab") as file:
                file.write(np.ascontiguousarray(rows_NF, dtype=self._dtype).tobytes())
            if self.form != "npy":
                with open_text_to_write(self._ids, "ab") as names:
                    names.writelines(f"{json.dumps(each)}\n" for each in ids)
                fsync_path(self._ids)
            fsync_path(self._part)
            rows = self.rows + len(rows_NF)
            state = {"key": self._key, "rows": rows, "ids_bytes": self._ids.stat().st_size, "notes": dict(notes)}
            write_json(self._state, state)
        self.rows, self.notes = rows, dict(notes)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Give the complete file its name.

        Args:
            metadata: of the schema, for Parquet and Arrow.
        """
        if self.form == "npy":
            with open_to_write(self._part, "r+b") as file:
                file.write(npy_header(self._dtype, (self.rows, self._width)))
            fsync_path(self._part)
            os.replace(self._part, self.out)
            fsync_path(self.out.parent)
        else:
            kept = f"all vectors are kept in {self._part}, and the same command only writes this file"
            with noting(kept) if self._resumable else nullcontext():
                self._write_table(metadata)
        self.discard()

    def discard(self) -> None:
        """Delete the unfinished files."""
        for path in (self._state, self._part, self._ids):
            path.unlink(missing_ok=True)

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
        with self._part.open("rb") as file, self._ids.open(encoding="utf-8") as names:
            file.seek(_HEADER_BYTES)
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
    assert len(header) == _HEADER_BYTES
    return header
