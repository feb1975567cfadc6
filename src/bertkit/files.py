"""Files that survive a crash (written completely or not at all), their sha256, and checks of file names in files.

Source: POSIX rename(2) and fsync(2); a rename within one directory is atomic, and durable once the directory is synced.
Used by every layer; run/checkpoint.py does the same for a directory of files. Imports only the standard library.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import logging
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO, Literal

from bertkit.errors import DataError
from bertkit.json_input import parse_json

log = logging.getLogger(__name__)


def cache_directory() -> Path:
    """The root of all caches: BERTKIT_CACHE, else ~/.cache/bertkit."""
    return Path(os.environ.get("BERTKIT_CACHE") or "~/.cache/bertkit").expanduser()


def bytes_in(path: Path) -> int:
    """The bytes of a file or of all files below a directory; links are not followed, missing files count 0."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size if os.path.lexists(path) else 0
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # a process that is writing there has just removed it
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def names_in(directory: Path) -> set[str]:
    """The names in a directory, without the file that macOS adds to each folder whose window was open."""
    return set(os.listdir(directory)) - {".DS_Store"}


def file_within(directory: Path, name: Any, source: str | Path) -> Path:
    """A file or directory that is named in one of the files of a model, run or data set; it need not exist.

    Links may lead to other places in the directory, and from a snapshot in the Hub's cache to the blobs of its model.

    Args:
        directory: the directory that the name is relative to and must stay in.
        name: the name in the file.
        source: the file that contains the name, for messages.

    Raises:
        DataError: not text, an absolute path, a path with `..`, an invalid file name, or a link out of the directory.
    """
    remedy = "only paths below its own directory are accepted; delete the entry, or get the files from their publisher"
    if not isinstance(name, str) or "\0" in name:
        raise DataError(f"{source}: names {name!r:.80}, which is not a file name; {remedy}")
    given = PurePosixPath(name.replace("\\", "/"))
    if given.is_absolute() or ".." in given.parts or PureWindowsPath(name).drive:
        raise DataError(f"{source}: names {name!r:.80}, which leads out of {directory}; {remedy}")
    path = directory / name
    try:
        real, roots = path.resolve(), [directory.resolve()]
        if real.is_symlink():  # a loop of links, which is an error of `resolve` only before Python 3.13
            real.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a name that UTF-8 cannot encode
        raise DataError(f"{source}: names {name!r:.80}, which cannot be followed: {error}") from error
    here = directory.absolute()
    roots += [each.parent.resolve() / "blobs" for each in here.parents if each.name == "snapshots"]
    if not any(real.is_relative_to(root) for root in roots):
        raise DataError(f"{source}: names {name!r:.80}, which a link leads out of {directory}; {remedy}")
    return path


def files_within(directory: Path, below: str, source: str | Path) -> list[str]:
    """The names, relative to `directory`, of the regular files below one of its directories, in order.

    Raises:
        DataError: a link leads out of `directory` (see `file_within`), or an entry is neither a file nor a directory.
    """
    found: list[str] = []
    open_names = [below]
    while open_names:
        name = open_names.pop()
        path = file_within(directory, name, source)
        if path.is_dir():
            if path.is_symlink():
                raise DataError(f"{path}: is a link to a directory; replace it by the directory itself")
            open_names += [(PurePosixPath(name) / each.name).as_posix() for each in path.iterdir()]
        elif path.is_file():
            found.append(name)
        else:
            raise DataError(f"{path}: is neither a file nor a directory; remove it")
    return sorted(found)


def fsync_path(path: Path) -> None:
    """Force a file's content, or a directory's list of names, to disk; a few file systems, such as folders that a
    virtual machine shares with its host, cannot do the latter."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def one_at_a_time(lock: Path, what: Path) -> Iterator[None]:
    """Let one process at a time make something; others wait and then find it. Where the file system has no locks (NFS
    or Lustre, depending on how it is mounted), a warning replaces the waiting.

    Args:
        lock: a file for the lock, made if missing.
        what: what is made, for messages.
    """
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process is making %s; waiting for it", what)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("%s: this file system has no locks (%s); make it in one process at a time", what, error)
        yield


def is_being_made(lock: Path) -> bool:
    """Whether a process is within `one_at_a_time` with this lock."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no such file, or no locks
        return False
    return False


_UNSUPPORTED = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)


def unfinished_name(path: Path, ending: str = "tmp") -> Path:
    """A path next to another one, where it can be written before it is renamed. No other process uses the same one,
    not even on another machine or in another container that shares the directory: there, process ids are the same."""
    return path.with_name(f".{path.name}.{os.getpid()}{secrets.randbelow(10**6):06}.{ending}")


_UNFINISHED = re.compile(r"\..+\.\d{7,}\.tmp")


def is_unfinished(name: str) -> bool:
    """Whether a file has a name of `unfinished_name`: it is being written, or a process was killed while writing it."""
    return _UNFINISHED.fullmatch(name) is not None


_USER_INFO = re.compile(r"(?<=://)[^/\s\"'<>]*@")


def without_credentials(text: str) -> str:
    """The text without user names and passwords in URLs: `https://me:key@host/` becomes `https://host/`."""
    return _USER_INFO.sub("", text)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors of an open file, such as a full disk, which name none."""
    try:
        yield
    except OSError as error:
        if error.errno and not isinstance(error.filename, str):
            error.filename = str(path)
        raise


@contextmanager
def noting(what: str) -> Iterator[None]:
    """Add a sentence to errors of the system, for the command's message, such as what was kept."""
    try:
        yield
    except OSError as error:
        error.add_note(what)
        raise


def first_fault(error: OSError) -> str:
    """An error's message; of the errors of all files that `shutil.copytree` could not copy, the first."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        source, _, why = error.args[0][0]
        return f"{source}: {why.partition(': ')[0]}"
    return str(error)


class _NamedFile(io.FileIO):
    """A failed write names the file and how large it would have become."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            error.filename = self.name
            error.add_note(f"it needs {self.tell() + memoryview(content).nbytes:,} bytes or more")
            raise


def open_to_write(path: Path, mode: Literal["wb", "ab", "r+b"] = "wb", *, private: bool = False) -> io.BufferedWriter:
    """Open a file for writing whose failed writes name it, unlike those of `open`.

    Args:
        path: the file.
        mode: as for `open`.
        private: whether only its owner may read it, if it is new; else its mode follows the umask.

    Raises:
        OSError: it cannot be written; also from `write`, `flush` and `close`.
    """
    return io.BufferedWriter(_NamedFile(os.fspath(path), mode, opener=private_opener if private else None))


def open_text_to_write(path: Path, mode: Literal["wb", "ab"] = "wb", **options: Any) -> io.TextIOWrapper:
    """The same for text in UTF-8 with Unix line ends; `options` are those of `io.TextIOWrapper`."""
    return io.TextIOWrapper(open_to_write(path, mode), **{"encoding": "utf-8", "newline": "\n", **options})


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which replaces `path` atomically and durably at the end; a reader never sees a partial file.

    Args:
        path: the file.
        private: whether only its owner may read it; else its mode follows the umask.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
    """
    temporary = unfinished_name(path)
    try:
        with open_to_write(temporary, private=private) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)  # messages name the file that was asked for; a failed sync names none
            if path.exists():
                error.add_note("the file that was there is unchanged")
        raise
    fsync_path(path.parent)


def private_opener(path: str, flags: int) -> int:
    """For `open`: new files can be read and written only by their owner, regardless of the umask."""
    return os.open(path, flags, 0o600)


@contextmanager
def atomic_directory(to: Path) -> Iterator[Path]:
    """A directory to write in; renamed to `to` on success and removed on failure. What killed processes left next to
    `to` is removed first; `earlier_version` is put back, so that a failure leaves it."""
    made = [parent for parent in (to.parent, *to.parent.parents) if not parent.exists()]
    to.parent.mkdir(parents=True, exist_ok=True)
    _clear_left_by_kills(to)
    staging, old = (unfinished_name(to, what) for what in ("writing", "old"))
    try:
        staging.mkdir()
        with _claimed(staging):
            yield staging
            for path in sorted(staging.rglob("*")):
                fsync_path(path)
            fsync_path(staging)
            try:
                if to.exists():
                    to.rename(old)
                staging.rename(to)
            except BaseException:
                if old.exists() and not to.exists():
                    old.rename(to)
                raise
        fsync_path(to.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # not empty
                parent.rmdir()
        named = (error.filename2 or error.filename) if isinstance(error, OSError) else None
        if isinstance(error, OSError) and isinstance(named, str) and Path(named).is_relative_to(staging):
            error.filename = str(to / Path(named).relative_to(staging))  # messages name what was asked for
            error.filename2 = None
            error.add_note("the directory that was there is unchanged" if to.exists() else "nothing was written")
        raise
    _remove_directory(old)


def earlier_version(directory: Path) -> Path | None:
    """Where the content of a missing directory is if a process was killed while it replaced it by `atomic_directory`,
    between two renames; None if the directory exists or nothing was left."""
    if directory.exists():
        return None
    return max(_left_beside(directory, "old"), key=lambda each: each.stat().st_mtime, default=None)


def _left_beside(directory: Path, *endings: str) -> list[Path]:
    """The paths next to a directory that `unfinished_name` gave it with one of these endings."""
    name = re.compile(rf"\.{re.escape(directory.name)}\.\d{{7,}}\.({'|'.join(endings)})")
    try:
        return [each for each in directory.parent.iterdir() if name.fullmatch(each.name)]
    except OSError:  # there is no such directory, or it cannot be listed
        return []


def _clear_left_by_kills(to: Path) -> None:
    """Undo and remove what `atomic_directory` left if its process was killed; what a process still writes is kept."""
    if (earlier := earlier_version(to)) is not None:
        earlier.rename(to)
    for left in _left_beside(to, "writing", "old"):
        with _claimed(left) as is_free:
            if is_free:
                _remove_directory(left)


def _remove_directory(path: Path) -> None:
    """Remove a directory, or a link to one; what the disk does not let go of is removed another time."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _claimed(directory: Path) -> Iterator[bool]:
    """Hold the lock of a directory, which ends with the process; whether no other process holds it. Not where the file
    system has no locks."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:  # another process has just removed it
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        except OSError:
            is_free = False
        yield is_free
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replace `path` with a text in UTF-8; see `replacing`."""
    with replacing(path, private=private) as file:
        file.write(text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` with these bytes; see `replacing`."""
    with replacing(path) as file:
        file.write(content)


def finite(value: Any) -> Any:
    """The same value with every NaN and infinity replaced by None, since JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write `value` as indented JSON, see `replacing`; NaN and infinity become null."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_text(path, text, private=private)


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading, unless reading it might block or never end.

    Raises:
        DataError: a FIFO, device, socket or directory.
        OSError: missing or unreadable.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if stat.S_ISREG(path.stat().st_mode) else -1
    if descriptor >= 0 and stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    if descriptor >= 0:
        os.close(descriptor)
    what = "a directory" if path.is_dir() else "a pipe, device or socket"
    raise DataError(f"{path}: not a regular file but {what}; name a file (to read a pipe, use `-` where supported)")


MAX_JSON_BYTES = 64 << 20
"""Limit for a single JSON document; once parsed it takes up to about twenty times as much memory."""
MAX_LISTING_BYTES = 1 << 30
"""Limit for a document that lists all files or all words of a corpus."""


def read_json_file(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value of a file that contains one JSON document.

    Raises:
        DataError: the file is missing, not a regular file, too large, or invalid (see `json_input.parse_json`).
    """
    try:
        with open_regular(path) as file:
            # Limited to the file's size: otherwise a buffer of the limit would be allocated for every small file.
            content = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(content) > max_bytes:
        raise DataError(f"{path}: more than {max_bytes >> 20} MiB; valid files are smaller, so it is damaged")
    return parse_json(content, str(path))


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DataError: the file is missing, is not JSON (see `json_input`), or contains something other than an object.
    """
    value = read_json_file(path, max_bytes=max_bytes)
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


def sha256_of(path: Path) -> str:
    """The sha256 of a file's content, in hexadecimal.

    Raises:
        DataError: not a regular file.
        OSError: missing or unreadable.
    """
    with open_regular(path) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            error.filename = str(path)  # a failed read names none
            raise


def joint_sha256(hashes: Iterable[str]) -> str:
    """The sha256 of several hashes in this order, in hexadecimal."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def json_sha256(value: Any) -> str:
    """The sha256 of a JSON value, in hexadecimal, regardless of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def shown_path(path: Path) -> str:
    """A path as messages show it: relative if it is below the working directory."""
    real, here = path.resolve(), Path.cwd()
    return os.path.relpath(real, here) if real.is_relative_to(here) else str(path)
