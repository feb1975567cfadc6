"""What a teacher said, kept on disk, so that a text is read by it once however many students learn from it.

Own design. An item (an example of a task, a sequence of a text) is known by the hash of its tokens, and of those among
them that are asked about. Values are appended to one file, and then a record with their place and checksum to another,
so that what a crash cuts off is a tail that the next opening drops; what is found damaged is computed anew, and its
later record counts. One process writes at a time, others read. The directory is named by what the values depend on, and
its manifest repeats it.

    values.bin   rows x classes floats of one item, and behind them the states that were asked for | next item ...
    index.bin    key, place, rows, classes, floats, checksum: 40 bytes an item
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bertkit.data.batch import PackedBatch, sequence_keys
from bertkit.errors import DataError
from bertkit.files import read_json, write_json

log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_RECORD = np.dtype(
    [("key", "V16"), ("place", "<u8"), ("rows", "<u4"), ("classes", "<u4"), ("floats", "<u4"), ("checksum", "<u4")]
)
_BYTES = 4


@dataclass(frozen=True)
class StoredOutputs:
    """What is kept of one item.

    Attributes:
        rows, classes: of its logits, which stand first.
        values: all floats of it.
    """

    rows: int
    classes: int
    values: NDArray[np.float32]


@dataclass(frozen=True)
class _Place:
    start: int
    rows: int
    classes: int
    floats: int
    checksum: int


class TeacherStore:
    """Values by item; open one with `open`.

    Attributes:
        directory: where it lies.
        max_bytes: of the values; what does not fit is not kept.
        is_writer: whether this process may add to it.
    """

    def __init__(self, directory: Path, *, max_bytes: float) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self._values = os.open(directory / "values.bin", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._index = os.open(directory / "index.bin", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.is_writer = _locked(self._index)
        self._places: dict[bytes, _Place] = {}
        self._records = 0
        self._end = 0
        self._said_full = False
        self._read_index()

    @classmethod
    def open(cls, directory: Path, identity: Mapping[str, str], *, max_bytes: float) -> TeacherStore:
        """The store in this directory, made where there is none.

        Args:
            directory: of this store alone.
            identity: what the values depend on, by name: teacher, tokenizer, data, what is kept.
            max_bytes: see the class.

        Raises:
            DataError: the directory belongs to another teacher, or is no store.
        """
        manifest = directory / _MANIFEST
        try:
            if not manifest.exists():
                _make(directory, identity)
            if not manifest.exists():
                raise DataError(f"{directory}: holds other files than a teacher's answers; name an empty directory")
            _check(manifest, identity)
            return cls(directory, max_bytes=max_bytes)
        except OSError as error:
            raise DataError(f"{directory}: cannot keep a teacher's answers there: {error}") from error

    @classmethod
    def in_cache(cls, cache: Path, identity: Mapping[str, str], *, max_bytes: float) -> TeacherStore:
        """The store of this identity below a cache's root; arguments and errors as of `open`."""
        digest = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()
        return cls.open(cache / "teachers" / digest[:32], identity, max_bytes=max_bytes)

    @property
    def size_bytes(self) -> int:
        """What is kept."""
        return self._end

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def get(self, keys: Sequence[bytes]) -> list[StoredOutputs] | None:
        """What is kept of these items, in their order; None where one of them is not there or is damaged."""
        found: list[StoredOutputs] = []
        for key in keys:
            place = self._places.get(key)
            if place is None:
                return None
            raw = os.pread(self._values, place.floats * _BYTES, place.start)
            if zlib.crc32(raw) != place.checksum:
                log.warning("%s: a teacher's answer is damaged and will be computed anew", self.directory)
                del self._places[key]
                return None
            found.append(StoredOutputs(place.rows, place.classes, np.frombuffer(raw, dtype=np.float32)))
        return found

    def add(self, key: bytes, rows: int, classes: int, values: NDArray[np.float32]) -> None:
        """Keep what a teacher made of an item, unless it is there, does not fit, or another process is writing."""
        raw = np.ascontiguousarray(values, dtype="<f4").tobytes()
        if not self.is_writer or key in self._places:
            return
        if self._end + len(raw) > self.max_bytes:
            self._say_full(f"they would take more than {self.max_bytes / 1e9:.2f} GB")
            return
        place = _Place(self._end, rows, classes, len(raw) // _BYTES, zlib.crc32(raw))
        record = np.array([(key, place.start, rows, classes, place.floats, place.checksum)], dtype=_RECORD)
        try:
            _write(self._values, raw, place.start)
            _write(self._index, record.tobytes(), self._records * _RECORD.itemsize)
        except OSError as error:
            self._say_full(f"the disk does not take them ({error.strerror})")
            return
        self._places[key] = place
        self._records += 1
        self._end += len(raw)

    def close(self) -> None:
        """Let others write."""
        for descriptor in (self._values, self._index):
            os.close(descriptor)

    def _say_full(self, why: str) -> None:
        if not self._said_full:
            log.warning("no more of the teacher's answers are kept: %s; the rest are computed in every pass", why)
        self._said_full = True

    def _read_index(self) -> None:
        """The records up to the first one whose values are not whole; a writer cuts both files there.

        Of an item that was found damaged and computed anew there are two, and the later one counts.
        """
        size = os.fstat(self._values).st_size
        raw = os.pread(self._index, os.fstat(self._index).st_size, 0)
        records = np.frombuffer(raw[: len(raw) // _RECORD.itemsize * _RECORD.itemsize], dtype=_RECORD)
        for record in records:
            place = _Place(*(int(record[name]) for name in ("place", "rows", "classes", "floats", "checksum")))
            end = place.start + place.floats * _BYTES
            if place.start != self._end or end > size:
                break
            self._places[bytes(record["key"])] = place
            self._records += 1
            self._end = end
        if self.is_writer:
            os.ftruncate(self._index, self._records * _RECORD.itemsize)
            os.ftruncate(self._values, self._end)
        else:
            log.info("%s: another process is writing here; what it has not written yet is not kept", self.directory)


def keys_of(packed: PackedBatch, asked_T: Tensor | None) -> list[bytes]:
    """What each sequence of a batch is known by, 16 bytes: its tokens, and those of them that a teacher is asked about.

    Args:
        packed: the batch.
        asked_T: whose rows of logits are wanted, bool; None where the tokens themselves tell.
    """
    keys = sequence_keys(packed)
    if asked_T is None:
        return keys
    parts = np.split(asked_T.cpu().numpy(), packed.sequences.cu_seqlens_B1[1:-1].cpu().numpy())
    return [
        hashlib.blake2b(key + part.tobytes(), digest_size=16).digest() for key, part in zip(keys, parts, strict=True)
    ]


def _make(directory: Path, identity: Mapping[str, str]) -> None:
    """Make an empty store, whole under its name, unless another process was first or other files are there."""
    writing = directory.with_name(f".{directory.name}.{os.getpid()}.new")
    writing.mkdir(parents=True, exist_ok=True)
    try:
        write_json(writing / _MANIFEST, dict(identity))
        writing.rename(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _check(manifest: Path, identity: Mapping[str, str]) -> None:
    here = read_json(manifest)
    differing = [name for name in identity if here.get(name) != identity[name]] or [
        name for name in here if name not in identity
    ]
    if differing:
        lines = ", ".join(f"{name} {here.get(name)!r}, not {identity.get(name)!r}" for name in differing)
        raise DataError(
            f"{manifest.parent}: these answers belong to another teacher or other data ({lines}); remove the directory,"
            " or name another one"
        )


def _locked(descriptor: int) -> bool:
    """Whether this process is the one that writes, until it ends or closes the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _write(descriptor: int, raw: bytes, place: int) -> None:
    """All of it, or an OSError."""
    view = memoryview(raw)
    while view:
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written
