"""Files that survive a crash: written whole or not at all, and known by their sha256.

Source: POSIX rename(2) and fsync(2); a rename within one directory is atomic, and lasts once the directory is synced.
For every layer; run/checkpoint.py does the same for a directory of files. Imports the standard library only.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from bertkit.errors import DataError


def cache_directory() -> Path:
    """The root of all caches: BERTKIT_CACHE, else ~/.cache/bertkit."""
    return Path(os.environ.get("BERTKIT_CACHE") or "~/.cache/bertkit").expanduser()


def bytes_in(path: Path) -> int:
    """The bytes of a file, or of all files below a directory; links count as links, what is not there as nothing."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size if os.path.lexists(path) else 0
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)


def fsync_path(path: Path) -> None:
    """Force a file's content, or a directory's list of names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that replaces `path` atomically and durably at the end; a reader never sees a part of it.

    Raises:
        OSError: the disk refused; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace `path` with a text in UTF-8, see `replacing`."""
    with replacing(path) as file:
        file.write(text.encode())


def finite(value: Any) -> Any:
    """The same value with every NaN and infinity replaced by None, since JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinity become null."""
    write_text(path, json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DataError: the file is missing, is not JSON, or holds something other than an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise DataError(f"{path}: is not valid JSON ({error}); the file is damaged") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


def sha256_of(path: Path) -> str:
    """The sha256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
