"""Results written block by block into files next to the one to be written; an interrupted run can be continued.

Not from a paper. Until the last block is written, the rows are in OUT.part, further parts of them in OUT.part.NAME, and
their description in OUT.part.json, so only a complete file ever has the requested name. vector_files.py (dense
vectors), sparse_vectors.py (sparse ones) and token_vectors.py (a vector for each token) say what is in them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bertkit.errors import DataError
from bertkit.files import fsync_path, noting, open_to_write, read_json, write_json

log = logging.getLogger(__name__)


@contextmanager
def writing_alone(out: Path) -> Iterator[None]:
    """While the parts of a file are begun, continued and finished: no other process appends rows to the same ones.

    Raises:
        DataError: another process is within this context.
    """
    part = part_of(out)
    with open_to_write(part, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{out}: another process is writing it; wait for that, or name another file") from error
        except OSError as error:
            log.warning("%s: this file system has no locks (%s); write it in one process at a time", out, error)
        try:
            yield
        finally:
            if part.is_file() and not part.stat().st_size:
                part.unlink()


def part_of(out: Path) -> Path:
    """Where the rows of a file are until it is finished."""
    return out.with_name(f"{out.name}.part")


class PartFiles:
    """The files of a result that is being written.

    Args:
        out: the name of the finished file.
        key: determines the rows; an unfinished file with a different key is started again.
        others: the names of further files.
        header_bytes: left free at the start of OUT.part.
        resumable: whether an unfinished file may be continued.

    Attributes:
        rows: of all blocks so far, including those of an earlier run.
        notes: the notes written with the last block.
    """

    def __init__(
        self,
        out: Path,
        key: Mapping[str, Any],
        *,
        others: Sequence[str] = (),
        header_bytes: int = 0,
        resumable: bool = True,
    ) -> None:
        self.out = out
        self.rows = 0
        self.notes: dict[str, Any] = {}
        self.part = part_of(out)
        self._paths = {"": self.part, **{name: out.with_name(f"{out.name}.part.{name}") for name in others}}
        self._state = out.with_name(f"{out.name}.part.json")
        self._key, self._resumable = dict(key), resumable
        if resumable:
            self._continue()
        if not self.rows:
            self._begin(header_bytes)

    def path(self, name: str) -> Path:
        """One of the further files."""
        return self._paths[name]

    def _begin(self, header_bytes: int) -> None:
        self._state.unlink(missing_ok=True)
        for name, path in self._paths.items():
            with open_to_write(path) as file:
                file.write(b"" if name else b"\0" * header_bytes)

    def _continue(self) -> None:
        if not (self._state.is_file() and all(path.is_file() for path in self._paths.values())):
            return
        try:
            state = read_json(self._state)
        except DataError as fault:
            log.warning("%s; the file is written again from the start", fault)
            return
        if state.get("key") != json.loads(json.dumps(self._key)):
            log.warning("%s was begun with another model, input or other options; it is begun again", self.part)
            return
        rows, notes = state.get("rows"), state.get("notes")
        sizes: Any = state.get("bytes")
        if not (isinstance(rows, int) and isinstance(notes, dict) and self._has_all(sizes)):
            log.warning("%s is damaged; it is begun again", self.part)
            return
        for name, path in self._paths.items():
            os.truncate(path, sizes[name])
        self.rows, self.notes = rows, notes

    def _has_all(self, sizes: Any) -> bool:
        """Whether the files are at least as long as described."""
        return isinstance(sizes, dict) and all(
            isinstance(sizes.get(name), int) and path.stat().st_size >= sizes[name]
            for name, path in self._paths.items()
        )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """While blocks are written: after an error, files that cannot be continued are deleted."""
        try:
            yield
        except BaseException:
            if not self._resumable:
                self.discard()
            raise

    def write(self, rows: int, contents: Mapping[str, bytes], notes: Mapping[str, Any]) -> None:
        """Write a block; once this returns, the block is never computed again.

        Args:
            rows: of the block.
            contents: to append to OUT.part ("") and to the further files, by name.
            notes: information needed to continue.
        """
        kept = f"the first {self.rows:,} vectors are kept, and the same command continues after them"
        with noting(kept) if self.rows and self._resumable else nullcontext():
            for name, content in contents.items():
                with open_to_write(self._paths[name], "ab") as file:
                    file.write(content)
                fsync_path(self._paths[name])
            sizes = {name: path.stat().st_size for name, path in self._paths.items()}
            state = {"key": self._key, "rows": self.rows + rows, "bytes": sizes, "notes": dict(notes)}
            write_json(self._state, state)
        self.rows, self.notes = self.rows + rows, dict(notes)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """While the finished file is written from the parts, which are deleted afterwards."""
        kept = f"all vectors are kept in {self.part}, and the same command only writes this file"
        with noting(kept) if self._resumable else nullcontext():
            yield
        self.discard()

    def rename(self) -> None:
        """Give OUT.part the name of the finished file, and delete the others."""
        fsync_path(self.part)
        os.replace(self.part, self.out)
        fsync_path(self.out.parent)
        self.discard()

    def discard(self) -> None:
        """Delete the unfinished files."""
        for path in (self._state, *self._paths.values()):
            path.unlink(missing_ok=True)
