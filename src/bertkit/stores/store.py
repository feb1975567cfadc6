"""A store: listing, reading, writing and removing the files below a place. The only file that uses fsspec.

Libraries: fsspec, with s3fs and gcsfs for S3 and Google Cloud Storage, which read the usual environment variables
(AWS_*, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS). They are imported when a store is first used. If a failure
may be temporary, the operation is retried a few times, each with a line in the log, and then raises a `StoreError`.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from bertkit.errors import DataError, UsageError, first_line
from bertkit.files import fsync_path, is_unfinished, naming, unfinished_name
from bertkit.stores.failures import Failure
from bertkit.stores.url import SCHEMES, StoreUrl

ATTEMPTS = 4
"""Attempts at an operation with a temporary failure."""
FIRST_PAUSE_SECONDS = 0.5
"""Before the second attempt; doubles with each attempt."""
_TAGS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "updated", "created")
"""Entries, besides the size, that identify a file's content in a file system; any change changes one of them."""

_ERRORS = {
    "s3": (
        ("aiohttp", "ClientError"),
        ("botocore.exceptions", "BotoCoreError"),
        ("botocore.exceptions", "ClientError"),
    ),
    "gs": (
        ("aiohttp", "ClientError"),
        ("gcsfs.retry", "HttpError"),
        ("google.auth.exceptions", "GoogleAuthError"),
    ),
}
"""Errors that a scheme's client raises in addition to OSError, by module and name."""

log = logging.getLogger(__name__)

Value = TypeVar("Value")
Fault = Callable[[BaseException], bool]


class StoreError(DataError):
    """An operation of a store failed.

    Attributes:
        is_missing: whether there is no such file.
    """

    def __init__(self, message: str, *, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_missing = is_missing

    @classmethod
    def of(cls, url: StoreUrl, failure: Failure) -> StoreError:
        """The error for a failed operation on a place."""
        return cls(f"{url}: {failure.reason}", is_missing=failure.is_missing)


@dataclass(frozen=True)
class StoredFile:
    """A file on a store.

    Attributes:
        size: in bytes.
        tag: a value of the store that changes with the content: entity tag, generation, or time of modification.
    """

    size: int
    tag: str

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> StoredFile:
        """From the information that fsspec returns."""
        tags = (f"{name}={info[name]}" for name in _TAGS if info.get(name) is not None)
        return cls(int(info.get("size") or 0), "|".join(tags))


class Store:
    """The files below a place of a store; names are relative to it, with slashes.

    Args:
        url: the place.

    Raises:
        UsageError: the client library of this scheme is not installed.
        StoreError: the store's client cannot be set up.
    """

    def __init__(self, url: StoreUrl) -> None:
        self.url = url
        self._files, self._errors = _client(url)

    def list(self) -> dict[str, StoredFile]:
        """All files below the place; if the place is itself a file, only that file, under the empty name.

        Raises:
            StoreError: the store cannot be read. A place that does not exist has no files and is not an error.
        """
        try:
            found = self._do(self.url, lambda: self._files.find(self.url.path, detail=True))
        except StoreError as error:
            if error.is_missing:
                return {}
            raise
        return {
            self._relative(path): StoredFile.of(info)
            for path, info in sorted(found.items())
            if self.url.uses_network or not is_unfinished(Path(path).name)
        }

    def matching(self) -> dict[str, StoredFile]:
        """The files that match the place as a pattern, by their full paths.

        Raises:
            StoreError: the store cannot be read.
        """
        found = self._do(self.url, lambda: self._files.glob(self.url.path, detail=True))
        return {path: StoredFile.of(info) for path, info in sorted(found.items()) if info.get("type") == "file"}

    def get(self, name: str, path: Path) -> None:
        """Download a file to a local path, which is then either complete or absent.

        Raises:
            StoreError: the file does not exist, or the store cannot be read.
            OSError: the local disk is full.
        """
        temporary = unfinished_name(path)
        source = self._path(name)
        try:
            with naming(path):
                self._do(self.named(name), partial(self._files.get_file, source, str(temporary)), here=_is_full_disk)
                fsync_path(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def get_bytes(self, name: str) -> bytes | None:
        """A small file's content; None if there is no such file.

        Raises:
            StoreError: the store cannot be read, or there is no such bucket.
        """
        try:
            content: bytes = self._do(self.named(name), lambda: self._files.cat_file(self._path(name)))
        except StoreError as error:
            if error.is_missing:
                return None
            raise
        return content

    def put(self, path: Path, name: str) -> None:
        """Upload a local file; a reader sees either the old file or the new one.

        Raises:
            StoreError: the store does not accept it.
            FileNotFoundError: the local file no longer exists.
        """

        def is_gone(error: BaseException) -> bool:
            return isinstance(error, FileNotFoundError) and not path.exists()

        self._write(name, partial(self._files.put_file, str(path)), here=is_gone)

    def put_bytes(self, content: bytes, name: str) -> None:
        """Upload the content of a small file; otherwise as `put`."""
        self._write(name, lambda target: self._files.pipe_file(target, content))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; files that no longer exist are ignored.

        Raises:
            StoreError: the store refuses.
        """
        for name in names:
            try:
                self._do(self.named(name), partial(self._files.rm_file, self._path(name)))
            except StoreError as error:
                if not error.is_missing:
                    raise
            if not self.url.uses_network:
                self._remove_empty(Path(self._path(name)).parent)

    def _remove_empty(self, directory: Path) -> None:
        """Remove directories without files, which do not exist on object stores either."""
        while directory != Path(self.url.path) and directory.is_relative_to(self.url.path):
            try:
                directory.rmdir()
            except OSError:
                return  # it contains files, or is gone
            directory = directory.parent

    def _write(self, name: str, write: Callable[[str], object], here: Fault = lambda error: False) -> None:
        target = self._path(name)
        if self.url.uses_network:  # an object is replaced as a whole
            self._do(self.named(name), lambda: write(target), here=here)
            return
        temporary = str(unfinished_name(Path(target)))

        def replace() -> None:
            try:
                write(temporary)
                os.replace(temporary, target)
            finally:
                Path(temporary).unlink(missing_ok=True)

        self._do(self.named(name), replace, here=here)

    def _do(self, url: StoreUrl, operation: Callable[[], Value], *, here: Fault = lambda error: False) -> Value:
        """The operation's value, after as many attempts as needed and allowed; a fault of this machine, recognised by
        `here`, is raised unchanged."""
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return operation()
            except self._errors as error:
                if here(error):
                    raise
                failure = Failure.of(error)
                if not failure.may_pass or attempt == ATTEMPTS:
                    raise StoreError.of(url, failure) from error
                log.info("%s: %s; attempt %d of %d follows", url, failure.reason, attempt + 1, ATTEMPTS)
            time.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    def named(self, name: str) -> StoreUrl:
        """The place of a file; the empty name is the place itself."""
        return self.url / name if name else self.url

    def _path(self, name: str) -> str:
        return self.named(name).path

    def _relative(self, path: str) -> str:
        return "" if path == self.url.path else path.removeprefix(f"{self.url.path.rstrip('/')}/")


def _is_full_disk(error: BaseException) -> bool:
    """Whether the local disk is too full for a download."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and error.errno in full and error.__cause__ is None


def _client(url: StoreUrl) -> tuple[Any, tuple[type[BaseException], ...]]:
    """The file system of a scheme, and the errors that its operations raise."""
    import fsspec

    options = {"use_listings_cache": False} if url.uses_network else {"auto_mkdir": True}
    errors: tuple[type[BaseException], ...] = (OSError,)
    try:
        fsspec.get_filesystem_class(url.scheme)  # which imports the client
        errors += tuple(getattr(import_module(module), name) for module, name in _ERRORS.get(url.scheme, ()))
    except ImportError as missing:
        raise UsageError(
            f"{url}: {url.scheme}:// needs a library that is not installed ({first_line(missing)}); pip install"
            f" 'bertkit[{SCHEMES[url.scheme]}]'"
        ) from missing
    try:
        files = fsspec.filesystem(url.scheme, **options)
    except errors as error:
        raise StoreError.of(url, Failure.of(error)) from error
    if url.scheme == "s3":
        files.retries = 1  # `Store` retries and logs it
    return files, errors
