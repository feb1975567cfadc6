"""A teacher's outputs kept on disk, so that each text is read by it once however many students learn from it.

Own design. An item (an example of a task, a sequence of a text) is identified by the hash of its tokens, and of the
tokens whose logits are wanted. Values are appended to one file, and then a record with their place and checksum to
another, so that a crash leaves a tail that the next opening drops; a damaged item is computed anew, and its later
record counts. One process writes at a time, others read. The directory is named by what the values depend on, and its
manifest repeats it.

    values.bin   rows x columns floats of one item, and behind them its states | next item ...
    index.bin    key, place, rows, columns, floats, checksum: 40 bytes an item

The rows are the logits of a task's classes. Of a text's words only the k likeliest are kept, and one logit more, which
all other words then share: the one at which their total probability is what it was, at temperature 1. A fresh output is
cut in the same way as one that is read back, so that a full disk changes no result. Attention scores, which grow with
the square of the length, are never kept.

Shapes: M rows of logits, V vocabulary, k likeliest words, D width; m rows of one part.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.errors import DataError
from bertkit.files import read_json, write_json
from bertkit.models.vocabulary import LOGIT_BYTES, WordLogits

log = logging.getLogger(__name__)

_FORMAT = "2"
"""Part of a cache's identity: what older versions wrote is made anew."""
_MANIFEST = "manifest.json"
_RECORD = np.dtype(
    [("key", "V16"), ("place", "<u8"), ("rows", "<u4"), ("columns", "<u4"), ("floats", "<u4"), ("checksum", "<u4")]
)
_BYTES = 4


@dataclass(frozen=True)
class CachedItem:
    """What is kept of one item.

    Attributes:
        rows, columns: of its logits, which stand first.
        values: all its floats.
    """

    rows: int
    columns: int
    values: NDArray[np.float32]


@dataclass(frozen=True)
class _Place:
    start: int
    rows: int
    columns: int
    floats: int
    checksum: int


class TeacherCache:
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
        self._is_full = False
        self._read_index()

    @classmethod
    def open(cls, directory: Path, identity: Mapping[str, str], *, max_bytes: float) -> TeacherCache:
        """The cache in this directory, made where there is none.

        Args:
            directory: of this cache alone.
            identity: what the values depend on, by name: teacher, tokenizer, data, what is kept.
            max_bytes: see the class.

        Raises:
            DataError: the directory belongs to another teacher, or is no cache.
        """
        manifest = directory / _MANIFEST
        try:
            if not manifest.exists():
                _make(directory, identity)
            if not manifest.exists():
                raise DataError(f"{directory}: holds other files than a teacher's outputs; name an empty directory")
            _check(manifest, identity)
            return cls(directory, max_bytes=max_bytes)
        except OSError as error:
            raise DataError(f"{directory}: cannot keep a teacher's outputs there: {error}") from error

    @classmethod
    def under(cls, root: Path, identity: Mapping[str, str], *, max_bytes: float) -> TeacherCache:
        """The cache of this identity below the root of all caches; arguments and errors as of `open`."""
        identity = {**identity, "format": _FORMAT}
        digest = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()
        return cls.open(root / "teachers" / digest[:32], identity, max_bytes=max_bytes)

    @property
    def size_bytes(self) -> int:
        """What is kept."""
        return self._end

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def get(self, keys: Sequence[bytes]) -> list[CachedItem] | None:
        """What is kept of these items, in their order; None where one of them is not there or is damaged."""
        found: list[CachedItem] = []
        for key in keys:
            place = self._places.get(key)
            if place is None:
                return None
            raw = os.pread(self._values, place.floats * _BYTES, place.start)
            if zlib.crc32(raw) != place.checksum:
                log.warning("%s: a teacher's output is damaged and will be computed anew", self.directory)
                del self._places[key]
                return None
            found.append(CachedItem(place.rows, place.columns, np.frombuffer(raw, dtype=np.float32)))
        return found

    def add(self, key: bytes, item: CachedItem) -> None:
        """Keep an item, unless it is there, does not fit, or another process is writing."""
        raw = np.ascontiguousarray(item.values, dtype="<f4").tobytes()
        if not self.is_writer or key in self._places:
            return
        if self._end + len(raw) > self.max_bytes:
            self._warn_full(f"they would take more than {self.max_bytes / 1e9:.2f} GB")
            return
        place = _Place(self._end, item.rows, item.columns, len(raw) // _BYTES, zlib.crc32(raw))
        record = np.array([(key, *vars(place).values())], dtype=_RECORD)
        try:
            _write(self._values, raw, place.start)
            _write(self._index, record.tobytes(), self._records * _RECORD.itemsize)
        except OSError as error:
            self._warn_full(f"the disk does not take them ({error.strerror})")
            return
        self._places[key] = place
        self._records += 1
        self._end += len(raw)

    def close(self) -> None:
        """Let others write."""
        for descriptor in (self._values, self._index):
            os.close(descriptor)

    def _warn_full(self, why: str) -> None:
        if not self._is_full:
            log.warning("no more of the teacher's outputs are kept: %s; the rest are computed in every pass", why)
        self._is_full = True

    def _read_index(self) -> None:
        """The records up to the first one whose values are not whole; a writer cuts both files there.

        Of an item that was found damaged and computed anew there are two, and the later one counts.
        """
        size = os.fstat(self._values).st_size
        raw = os.pread(self._index, os.fstat(self._index).st_size, 0)
        records = np.frombuffer(raw[: len(raw) // _RECORD.itemsize * _RECORD.itemsize], dtype=_RECORD)
        for record in records:
            place = _Place(*(int(record[name]) for name in ("place", "rows", "columns", "floats", "checksum")))
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


@dataclass(frozen=True)
class TopWords(WordLogits):
    """Logits of which the largest are known.

    Attributes:
        word_Mk, largest_Mk: the k likeliest words of each row, and their logits.
        rest_M1: the logit of every other word.
        vocab_size: V.
    """

    word_Mk: Tensor
    largest_Mk: Tensor
    rest_M1: Tensor
    vocab_size: int

    @classmethod
    def of(cls, logits: WordLogits, rows: int, vocab_size: int, *, top_k: int) -> TopWords:
        """Of all rows, formed a few at a time; fewer words than `top_k` where there are no more."""
        top_k = min(top_k, vocab_size - 1)
        size = max(1, LOGIT_BYTES // (8 * vocab_size))
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for first in range(0, max(1, rows), size):  # of no rows one part, too, which is where the logits are
            logits_mV = logits.part(slice(first, first + size))
            largest_mk, word_mk = logits_mV.topk(top_k, dim=-1)
            others_mV = logits_mV.scatter(1, word_mk, -torch.inf)
            rest_m1 = torch.logsumexp(others_mV, dim=-1, keepdim=True) - math.log(vocab_size - top_k)
            parts.append((word_mk, largest_mk, rest_m1))
        word_Mk, largest_Mk, rest_M1 = (torch.cat(column) for column in zip(*parts, strict=True))
        return cls(word_Mk, largest_Mk, rest_M1, vocab_size)

    def part(self, part: slice) -> Tensor:
        rest_mV = self.rest_M1[part].expand(-1, self.vocab_size).clone()
        return rest_mV.scatter_(1, self.word_Mk[part], self.largest_Mk[part])

    def rows(self, index_M: Tensor) -> TopWords:
        return TopWords(self.word_Mk[index_M], self.largest_Mk[index_M], self.rest_M1[index_M], self.vocab_size)

    def table(self) -> NDArray[np.float32]:
        """Rows of words (as the bits of floats), logits and rest, (M, 2k + 1)."""
        columns = (self.word_Mk.int().view(torch.float32), self.largest_Mk, self.rest_M1)
        return np.asarray(torch.cat(columns, dim=1).cpu().numpy(), dtype=np.float32)

    @classmethod
    def from_table(cls, table: NDArray[np.float32], vocab_size: int, device: torch.device) -> TopWords:
        """The inverse of `table`."""
        top_k = table.shape[1] // 2
        columns = torch.from_numpy(table)
        word_Mk = columns[:, :top_k].contiguous().view(torch.int32).long()
        return cls(
            word_Mk.to(device),
            columns[:, top_k : 2 * top_k].contiguous().to(device),
            columns[:, 2 * top_k :].contiguous().to(device),
            vocab_size,
        )


def _make(directory: Path, identity: Mapping[str, str]) -> None:
    """Make an empty cache, whole under its name, unless another process was first or other files are there."""
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
            f"{manifest.parent}: these outputs belong to another teacher or other data ({lines}); remove the directory,"
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
