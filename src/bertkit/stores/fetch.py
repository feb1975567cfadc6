"""Copies of a store's files in the cache; each version of a file is fetched once.

Not from a paper. A copy is addressed by place, size and tag (entity tag, generation or time of modification), so a file
that changes on the store gets another copy. A copy is either complete or absent. The store is listed each time, and
only missing files are fetched. Everything here can be fetched again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from bertkit.cache import identity_hash
from bertkit.errors import DataError
from bertkit.files import cache_directory, one_at_a_time
from bertkit.progress import Progress, silent_progress
from bertkit.stores.store import Store, StoredFile
from bertkit.stores.url import StoreUrl

KIND = "fetched"
"""The directory of the cache."""

log = logging.getLogger(__name__)


def fetched_files(
    source: str,
    accepts: Callable[[Path], bool],
    *,
    cache: Path | None = None,
    offline: bool = False,
    progress: Progress = silent_progress,
) -> list[Path]:
    """Copies of a file, of all files below a place, or of those that match a pattern, in the order of their names.

    Args:
        source: the URL.
        accepts: selects files below a place by name; a file that is named directly is always used.
        cache: the cache's root.
        offline: use no network.
        progress: shows the bytes that are fetched.

    Raises:
        UsageError: not a URL of a store, or the client of its scheme is not installed.
        DataError: there is no such file, the store cannot be read, or the disk is full.
    """
    url = StoreUrl.parse(source)
    check_online(url, offline)
    if url.is_pattern:
        found = Store(url).matching()
        if not found:
            raise DataError(f"{url}: no file matches")
    else:
        listed = Store(url).list()
        if not listed:
            raise DataError(f"{url}: there is no such file, and there are no files below it")
        found = {
            (url / name if name else url).path: file for name, file in listed.items() if not name or accepts(Path(name))
        }
        if not found:
            raise DataError(f"{url}: none of the {len(listed):,} files below it has a known ending")
    paths: list[Path] = []
    missing: dict[Path, tuple[str, StoredFile]] = {}
    for name in sorted(found, key=PurePosixPath):
        _safe(url, name.lstrip("/"))
        path = _copy_of(StoreUrl(url.scheme, name), found[name], cache)
        if not _is_complete(path, found[name]):
            missing[path] = name, found[name]
        paths.append(path)
    with _fetching(url, missing, progress) as done:
        for path, (name, file) in missing.items():
            _fetch(Store(StoreUrl(url.scheme, name)), "", path, file)
            done(file.size)
    return paths


def fetched_directory(
    url: StoreUrl,
    *,
    cache: Path | None = None,
    offline: bool = False,
    progress: Progress = silent_progress,
) -> Path:
    """A copy of the files below a place, as a directory.

    An interrupted copy is continued; otherwise as `fetched_files`.
    """
    check_online(url, offline)
    store = Store(url)
    files = {name: file for name, file in store.list().items() if name}
    if not files:
        raise DataError(f"{url}: there are no files below it")
    versions = [[name, file.size, file.tag] for name, file in files.items()]
    root = (cache or cache_directory()) / KIND
    root.mkdir(parents=True, exist_ok=True)
    directory = root / identity_hash([str(url), versions])
    with one_at_a_time(directory.with_name(f".{directory.name}.lock"), directory):
        # A machine that crashed may have left a directory without the content of its files.
        writing = directory if directory.is_dir() else directory.with_name(f".{directory.name}.writing")
        fetch_into(store, files, writing, progress=progress)
        os.rename(writing, directory)
    return directory


def fetch_into(
    store: Store, files: Mapping[str, StoredFile], directory: Path, *, progress: Progress = silent_progress
) -> None:
    """Copy files of a store into a directory; files that an interrupted copy already has are not fetched again.

    Raises:
        DataError: the store cannot be read, the number of bytes is wrong, or the disk is full.
    """
    missing = {}
    for name, file in files.items():
        path = directory / _safe(store.url, name)
        if not _is_complete(path, file):
            missing[path] = name, file
    with _fetching(store.url, missing, progress) as done:
        for path, (name, file) in missing.items():
            _fetch(store, name, path, file)
            done(file.size)


def _is_complete(path: Path, file: StoredFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size


def _fetch(store: Store, name: str, path: Path, file: StoredFile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    store.get(name, path)
    size = path.stat().st_size
    if size != file.size:
        path.unlink()
        raise DataError(f"{store.named(name)}: {size:,} bytes received, but {file.size:,} listed; the file changes")


@contextmanager
def _fetching(
    url: StoreUrl, missing: Mapping[Path, tuple[str, StoredFile]], progress: Progress
) -> Iterator[Callable[[int], None]]:
    """Display the bytes that are fetched; a full disk becomes a DataError."""
    if not missing:
        yield lambda size: None
        return
    total = sum(file.size for _, file in missing.values())
    log.info("fetching %s: %d files, %.1f MB", url, len(missing), total / 1e6)
    count = 0
    with progress(f"fetching {url.name}", total=total, unit="bytes") as meter:

        def done(size: int) -> None:
            nonlocal count
            count += size
            meter.update(count)

        try:
            yield done
        except OSError as error:
            raise DataError(f"{url}: cannot be copied into the cache: {error}; free some space") from error


def _copy_of(url: StoreUrl, file: StoredFile, cache: Path | None) -> Path:
    """The path of a file's copy, in which its own name and place stay readable, for messages and the file type."""
    digest = identity_hash([str(url), file.size, file.tag])
    return (cache or cache_directory()) / KIND / digest / url.scheme / url.path.lstrip("/")


def _safe(url: StoreUrl, name: str) -> str:
    if not name or ".." in PurePosixPath(name).parts or name.startswith("/") or "\0" in name:
        raise DataError(f"{url}: contains a file named {name!r:.80}, which is not a valid local file name; rename it")
    return name


def check_online(url: StoreUrl, offline: bool) -> None:
    """Raise DataError if a place is on the network but the network may not be used."""
    if offline and url.uses_network:
        raise DataError(f"{url}: is on the network, which --offline forbids; copy it to a disk first")
