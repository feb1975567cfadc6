"""Caches on disk: results that are expensive but can be recomputed, addressed by the hash of all they depend on.

Not from a paper. A single-file result (a plan, a harvested corpus) is at `cache_file` and is written by
`files.replacing`, so it is either complete or absent. Many small results (a teacher's outputs, features of a frozen
encoder) are records of a `RecordCache`. Anything may be deleted at any time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertkit.errors import DataError
from bertkit.files import json_sha256, read_json, unfinished_name, write_json

KINDS = {
    "shards": "token shards of texts",
    "plans": "samples of each epoch",
    "teachers": "outputs of teachers",
    "students": "initial weights of BiLSTM students",
    "augmented": "augmented training examples",
    "pydocs": "text of builtin:pydocs",
    "rates": "highest rates of matrix products",
    "kernels": "loops compiled for this processor",
    "fetched": "texts, shards and models of stores (s3://, gs://, file://)",
    "tables": "examples of the Hub (hub:ORG/NAME)",
    "adapters": "models with an adapter of PEFT merged into them",
}
"""The directories below the root of all caches, and their contents; an entry is a file or directory in one of them."""
WORKING_COPIES = "stored-runs"
"""The directory of runs on a store; unlike the others, it may contain files that exist nowhere else."""

_MANIFEST = "manifest.json"
_VALUES, _INDEX = "values.bin", "index.bin"
_RECORD = np.dtype([("key", "V16"), ("start", "<u8"), ("size", "<u4"), ("checksum", "<u4")])

log = logging.getLogger(__name__)


def identity_hash(identity: Any) -> str:
    """32 hexadecimal digits of the sha256 of a JSON value, regardless of the order of its keys."""
    return json_sha256(identity)[:32]


def cache_file(root: Path, kind: str, identity: Any, suffix: str) -> Path:
    """The path of a single-file result; its directory is created.

    Args:
        root: of all caches.
        kind: the directory below it.
        identity: everything that decides the content, as a JSON value.
        suffix: of the file.
    """
    directory = root / kind
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{identity_hash(identity)}{suffix}"


def lock_of_shards(directory: Path, root: Path) -> Path:
    """The lock file of a directory of token shards, for `files.one_at_a_time`; `root` is that of all caches."""
    return root / "locks" / f"{hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:32]}.lock"


class _Place(NamedTuple):
    start: int
    size: int
    checksum: int


class RecordCache:
    """Bytes by 16-byte key, in two files that only grow.

        values.bin   bytes of one record | of the next ...
        index.bin    key, start, size, checksum: 32 bytes per record

    A record's index entry is written after its bytes, so a crash leaves a tail that is dropped when the cache is next
    opened. A damaged record counts as missing; if it is added again, its last entry counts. One process writes at a
    time, others read.

    Args:
        values, index: descriptors of the two files.
        name: the path, for messages.
        what: the contents, in the plural, for messages.
        max_bytes: of the values; records that do not fit are not kept.
        is_writer: whether this process may add records.

    Attributes:
        is_full: whether a record was not kept for lack of room.
    """

    def __init__(self, values: int, index: int, *, name: str, what: str, max_bytes: float, is_writer: bool) -> None:
        self.name, self.what, self.max_bytes, self.is_writer = name, what, max_bytes, is_writer
        self.is_full = False
        self._values, self._index = values, index
        self._places: dict[bytes, _Place] = {}
        self._records = self._end = 0
        self._read_index()

    @classmethod
    def open(cls, directory: Path, identity: Mapping[str, str], *, what: str, max_bytes: float) -> RecordCache:
        """The cache in a directory of its own, which is created if missing.

        Args:
            directory: must not contain other files.
            identity: everything that the records depend on; also stored in the manifest.
            what, max_bytes: see the class.

        Raises:
            DataError: the directory belongs to another identity, is not a cache, or cannot be written.
        """
        try:
            if not (directory / _MANIFEST).exists():
                _make(directory, identity)
            if not (directory / _MANIFEST).exists():
                raise DataError(f"{directory}: contains other files than {what}; name an empty directory")
            _check(directory, identity, what)
            values, index = (
                os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666) for name in (_VALUES, _INDEX)
            )
        except OSError as error:
            raise DataError(f"{directory}: cannot store {what} there: {error}") from error
        is_writer = _is_locked(index, directory, what)
        return cls(values, index, name=str(directory), what=what, max_bytes=max_bytes, is_writer=is_writer)

    @classmethod
    def under(cls, root: Path, kind: str, identity: Mapping[str, str], *, what: str, max_bytes: float) -> RecordCache:
        """The cache of this identity below the root of all caches; otherwise as `open`."""
        return cls.open(root / kind / identity_hash(identity), identity, what=what, max_bytes=max_bytes)

    @classmethod
    def temporary(cls, directory: Path, *, what: str, max_bytes: float) -> RecordCache:
        """A cache in unnamed files, which disappear with the process, on the disk of `directory`."""
        with tempfile.TemporaryFile(dir=directory) as values, tempfile.TemporaryFile(dir=directory) as index:
            descriptors = os.dup(values.fileno()), os.dup(index.fileno())
        return cls(*descriptors, name=str(directory), what=what, max_bytes=max_bytes, is_writer=True)

    def private_copy(self, directory: Path) -> RecordCache:
        """A temporary cache with the records of this one, to which this process may add records."""
        copy = RecordCache.temporary(directory, what=self.what, max_bytes=self.max_bytes)
        for key in list(self._places):
            if (found := self.get([key])) is not None:
                copy.add(key, found[0])
        return copy

    @property
    def size_bytes(self) -> int:
        """The size of all values."""
        return self._end

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def get(self, keys: Sequence[bytes]) -> list[bytes] | None:
        """The records with these keys, in their order; None if any is missing or damaged."""
        found: list[bytes] = []
        for key in keys:
            place = self._places.get(key)
            if place is None:
                return None
            value = os.pread(self._values, place.size, place.start)
            if zlib.crc32(value) != place.checksum:
                log.warning("%s: one of the %s is damaged and will be recomputed", self.name, self.what)
                del self._places[key]
                return None
            found.append(value)
        return found

    def add(self, key: bytes, value: bytes) -> None:
        """Store a record, unless it exists, does not fit, or another process is writing."""
        if not self.is_writer or key in self._places:
            return
        if self._end + len(value) > self.max_bytes:
            self._warn_full(f"they would take more than {self.max_bytes / 1e9:.2f} GB")
            return
        place = _Place(self._end, len(value), zlib.crc32(value))
        try:
            _write(self._values, value, place.start)
            _write(self._index, np.array([(key, *place)], dtype=_RECORD).tobytes(), self._records * _RECORD.itemsize)
        except OSError as error:
            self._warn_full(f"they cannot be written ({error.strerror})")
            return
        self._places[key] = place
        self._records += 1
        self._end += len(value)

    def close(self) -> None:
        """Close the files and let others write."""
        for descriptor in (self._values, self._index):
            os.close(descriptor)

    def _warn_full(self, why: str) -> None:
        if not self.is_full:
            log.warning("no more %s are kept: %s; the rest are computed in every pass", self.what, why)
        self.is_full = True

    def _read_index(self) -> None:
        """Read the records up to the first with an incomplete value; a writer truncates both files there."""
        size = os.fstat(self._values).st_size
        raw = os.pread(self._index, os.fstat(self._index).st_size, 0)
        for key, *numbers in np.frombuffer(raw[: len(raw) // _RECORD.itemsize * _RECORD.itemsize], _RECORD).tolist():
            place = _Place(*numbers)
            if place.start != self._end or place.start + place.size > size:
                break
            self._places[key] = place
            self._records += 1
            self._end = place.start + place.size
        if self.is_writer:
            os.ftruncate(self._index, self._records * _RECORD.itemsize)
            os.ftruncate(self._values, self._end)


def _make(directory: Path, identity: Mapping[str, str]) -> None:
    """Create an empty cache atomically, unless another process was first or there are other files."""
    writing = unfinished_name(directory, "new")
    writing.mkdir(parents=True)
    try:
        write_json(writing / _MANIFEST, dict(identity))
        writing.rename(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _check(directory: Path, identity: Mapping[str, str], what: str) -> None:
    """Raise DataError if the manifest has another identity."""
    here = read_json(directory / _MANIFEST)
    differing = [name for name in {**identity, **here} if here.get(name) != identity.get(name)]
    if differing:
        lines = ", ".join(f"{name} {here.get(name)!r}, not {identity.get(name)!r}" for name in differing)
        raise DataError(
            f"{directory}: these {what} belong to something else ({lines}); remove the directory, or name another one"
        )


def _is_locked(descriptor: int, directory: Path, what: str) -> bool:
    """Whether this process is the writer, until it ends or closes the file; without locks, none is."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("%s: another process is writing here; records that it has not written yet are computed", directory)
        return False
    except OSError as error:
        log.warning(
            "%s: this file system has no locks (%s), so no more %s are kept there; set BERTKIT_CACHE to a directory on"
            " another one",
            *(directory, error, what),
        )
        return False
    return True


def _write(descriptor: int, content: bytes, start: int) -> None:
    """Write all of it, or raise an OSError."""
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written
