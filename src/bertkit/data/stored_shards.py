"""Token shards on a store: fetched into the cache once for reading, and uploaded after they are made.

Not from a paper. The manifest has the sha256 of every file: a copy is compared with it before it is used. The manifest
is written to a store last, so shards with a manifest are complete. Sibling shards.py reads a directory.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from bertkit.data.shards import MANIFEST, TokenShards
from bertkit.errors import DataError, UsageError
from bertkit.progress import Progress, silent_progress
from bertkit.stores.fetch import fetched_directory
from bertkit.stores.store import Store
from bertkit.stores.url import StoreUrl, is_url

log = logging.getLogger(__name__)


def shards_directory(
    source: str, *, cache: Path | None = None, offline: bool = False, progress: Progress = silent_progress
) -> Path:
    """The directory of token shards: a local one unchanged; for a store, its copy in the cache, checked by manifest.

    Raises:
        DataError: the store cannot be read, or its files do not match the manifest.
    """
    if not is_url(source):
        return Path(source)
    url = StoreUrl.parse(source)
    for attempt in ("kept", "fetched anew"):
        directory = fetched_directory(url, cache=cache, offline=offline, progress=progress)
        try:
            TokenShards.open(directory, verify=True)
        except DataError as error:
            shutil.rmtree(directory)  # only a copy: the store may have intact files, and nothing else reads it
            if attempt == "kept":
                log.warning("%s; the copy is fetched again", error)
                continue
            raise DataError(f"{url}: its files do not match its {MANIFEST}: {error}") from error
        return directory
    raise AssertionError("unreachable")


def store_shards(shards: TokenShards, url: StoreUrl, *, progress: Progress = silent_progress) -> None:
    """Upload finished shards to a place: the missing files, then, once all are there, the manifest.

    Raises:
        UsageError: the place contains other shards or other files.
        DataError: the store does not accept them.
    """
    store = Store(url)
    there = store.list()
    before = store.get_bytes(MANIFEST) if MANIFEST in there else None
    if before is not None and _identity(before) != shards.manifest.get("identity"):
        raise UsageError(
            f"{url} contains other files, or token shards with another source, tokenizer or option; shards are never"
            " changed: choose another place, or remove these files"
        )
    sizes = {name: int(file["bytes"]) for name, file in shards.manifest["files"].items()}
    strange = sorted(there.keys() - sizes.keys() - {MANIFEST})
    if strange:
        raise UsageError(f"{url} contains other files ({', '.join(strange[:3])}); choose another place")
    # Without a manifest, files of the right size may still come from an upload of another identity.
    missing = [name for name in sizes if before is None or name not in there or there[name].size != sizes[name]]
    with progress(f"uploading {url.name}", total=sum(sizes[name] for name in missing), unit="bytes") as meter:
        done = 0
        for name in missing:
            store.put(shards.directory / name, name)
            done += sizes[name]
            meter.update(done)
    there = store.list()
    wrong = [name for name, size in sizes.items() if name not in there or there[name].size != size]
    if wrong:
        raise DataError(f"{url}: {', '.join(wrong)} did not arrive completely; run the same command again")
    if before is None:
        store.put_bytes((shards.directory / MANIFEST).read_bytes(), MANIFEST)
    log.info("token shards are in %s", url)


def _identity(manifest: bytes) -> str | None:
    try:
        found = json.loads(manifest)
    except ValueError:
        return None
    return found.get("identity") if isinstance(found, dict) else None
