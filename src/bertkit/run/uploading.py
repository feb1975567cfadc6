"""Uploading a run directory to a store while the run continues.

Not from a paper. A thread watches the directory and uploads new files; training never waits for it. Files and
checkpoints get their names once they are complete, so the thread sees only complete ones, and the code that writes them
does not depend on stores. After a failure the upload is retried, less and less often. Sibling stored.py opens a run on
a store.

The order of writing ensures that the store contains a valid run at any moment:
    1. growing files, at least up to the length in the record and the seal, and all other files
    2. each checkpoint: its files, then its manifest; then `latest`; only then are older ones removed
    3. files.json and run.json, as they were before 1
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bertkit.errors import DataError
from bertkit.files import first_fault, read_json, write_json
from bertkit.progress import Progress
from bertkit.run.checkpoint import LATEST, MANIFEST, latest_name, list_checkpoints
from bertkit.run.directory import RECORD
from bertkit.run.lock import LOCK_FILE
from bertkit.run.seal import SEAL
from bertkit.stores.store import Store
from bertkit.visible import shell_word

LOOK_SECONDS = 1.0
"""Between two checks for new checkpoints."""
QUIET_SECONDS = 30.0
"""Between two uploads of logs and metrics if there is no new checkpoint."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 60.0
"""After a failed upload; doubles with each further failure."""
LAST_ATTEMPTS = 3
"""Attempts at the end of the run."""

_RECORDS = (SEAL, RECORD)
_STEP = re.compile(r"(?P<group>.+)/(?P<step>step-\d{8,})/[^/]+")
_IN_MEMORY = 16 << 20

log = logging.getLogger(__name__)

Counted = Callable[[int], None]
"""Called with the size of each uploaded file in bytes."""


class TakenOverError(DataError):
    """Another process has written the run on the store: nothing more may be uploaded from here."""


@dataclass(frozen=True)
class FileState:
    """A local file as it was when it was read.

    Attributes:
        size: in bytes.
        modified_ns: time of its last modification.
    """

    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The state of a file now."""
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns)


class UploadTable:
    """Which files of a run are on the store: the state of each when it was uploaded, in a file next to the run.

    Args:
        path: the file.
        url: of the run on the store.
    """

    def __init__(self, path: Path, url: str) -> None:
        self.path = path
        self.url = url
        known = read_json(path) if path.is_file() else {}
        self._files = {name: FileState(*state) for name, state in known.get("files", {}).items()}
        self._records: list[str] = known.get("records", [])

    def has(self, name: str, state: FileState) -> bool:
        """Whether exactly this state of a file is on the store."""
        return self._files.get(name) == state

    def names(self, below: str = "") -> list[str]:
        """The files on the store, or only those whose names begin with `below`."""
        return [name for name in self._files if name.startswith(below)]

    def add(self, name: str, state: FileState) -> None:
        """Record that a file is on the store."""
        self._files[name] = state

    def drop(self, name: str) -> None:
        """Record that a file is no longer on the store."""
        self._files.pop(name, None)

    def forget(self) -> None:
        """Record that nothing is on the store."""
        self._files, self._records = {}, []

    def wrote(self, record: bytes) -> bool:
        """Whether the store's run.json is the one last written from here."""
        return hashlib.sha256(record).hexdigest() in self._records

    def about_to_write(self, record: bytes) -> None:
        """Record that the store's run.json is about to be replaced by this one; a kill may leave the previous one."""
        self._records = [*self._records[-1:], hashlib.sha256(record).hexdigest()]
        self.save()

    def save(self) -> None:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files = {name: [state.size, state.modified_ns] for name, state in self._files.items()}
        write_json(self.path, {"url": self.url, "records": self._records, "files": files}, private=True)


def uploadable(directory: Path) -> Iterator[str]:
    """The names of the files of a run to upload: no lock, and none that is still being written.

    The target of a link, such as the chosen model of a suite, is uploaded as if it were in the run.
    """
    for folder, folders, names in os.walk(directory, followlinks=True):
        folders[:] = sorted(each for each in folders if not _is_unfinished(each))
        for name in sorted(names):
            if name != LOCK_FILE and not _is_unfinished(name):
                yield Path(folder, name).relative_to(directory).as_posix()


def _is_unfinished(name: str) -> bool:
    return name.startswith(".") or name.endswith((".writing", ".tmp"))


class Uploader:
    """Synchronises a place on a store with a run directory, in passes.

    Args:
        directory: the run.
        store: the place.
        table: what is already there.
    """

    def __init__(self, directory: Path, store: Store, table: UploadTable) -> None:
        self._directory = directory
        self._store = store
        self._table = table
        self._held = table.path.with_name("held")
        self._named: dict[str, str | None] = {}

    def outstanding(self) -> dict[str, int]:
        """The sizes of the files that are missing on the store, or outdated there."""
        missing = {}
        for name in uploadable(self._directory):
            with suppress(FileNotFoundError):
                state = FileState.of(self._directory / name)
                if not self._table.has(name, state):
                    missing[name] = state.size
        return missing

    def newest(self) -> tuple[tuple[str, int], ...]:
        """A value that changes when a checkpoint is finished: each `latest`, and when it was updated."""
        found = []
        for name in uploadable(self._directory):
            if name.endswith(f"/{LATEST}"):
                with suppress(FileNotFoundError):
                    found.append((name, FileState.of(self._directory / name).modified_ns))
        return tuple(sorted(found))

    def upload(self, counted: Counted = lambda size: None) -> None:
        """One pass: upload everything new, in the order given in the module docstring.

        Raises:
            DataError: the store does not accept it.
            TakenOverError: another process has written the run there.
        """
        self._check_owner()
        try:
            names = list(uploadable(self._directory))
            records = {name: self._read(name) for name in names if Path(name).name in _RECORDS}
            groups = {match["group"] for name in names if (match := _STEP.fullmatch(name))}
            groups |= {match["group"] for name in self._table.names() if (match := _STEP.fullmatch(name))}
            for name in names:
                if name not in records and not _is_of(name, groups):
                    self._put(name, counted)
            for group in sorted(groups):
                self._put_checkpoints(group, counted)
            for name in sorted(records, key=lambda name: (-name.count("/"), Path(name).name == RECORD)):
                self._put_record(name, records[name], counted)
            here = set(names)
            self._remove([each for each in self._table.names() if each not in here and not _is_of(each, groups)])
        finally:
            self._table.save()

    def _check_owner(self) -> None:
        record = self._store.get_bytes(RECORD)
        if record is not None and not self._table.wrote(record):
            raise TakenOverError(
                f"{self._store.url}: another process has written this run in the meantime; nothing more is uploaded,"
                f" and the output of this process stays in {self._directory}"
            )

    def _read(self, name: str) -> tuple[FileState, bytes] | None:
        try:
            path = self._directory / name
            return FileState.of(path), path.read_bytes()
        except FileNotFoundError:
            return None

    def _put(self, name: str, counted: Counted) -> None:
        """Upload a file, unless it is already on the store unchanged or has been deleted here."""
        path = self._directory / name
        try:
            state = FileState.of(path)
            if self._table.has(name, state):
                return
            if state.size <= _IN_MEMORY:  # it may grow during the upload
                self._store.put_bytes(path.read_bytes(), name)
            else:
                self._store.put(path, name)
        except FileNotFoundError:
            return
        self._table.add(name, state)
        counted(state.size)

    def _put_record(self, name: str, found: tuple[FileState, bytes] | None, counted: Counted) -> None:
        if found is None or self._table.has(name, found[0]):
            return
        state, content = found
        if name == RECORD:
            self._table.about_to_write(content)
        self._store.put_bytes(content, name)
        self._table.add(name, state)
        counted(state.size)

    def _put_checkpoints(self, group: str, counted: Counted) -> None:
        """Upload the checkpoints of a directory: the one that `latest` names, `latest` itself, then the others."""
        here = self._directory / group
        named = latest_name(here)
        steps = [path.name for path in list_checkpoints(here)[::-1]]
        for step in sorted(steps, key=lambda step: step != named):
            if self._put_checkpoint(group, step, counted) and step == named and self._on_store(group) != named:
                self._store.put_bytes(f"{named}\n".encode(), f"{group}/{LATEST}")
                self._named[group] = named
                self._table.add(f"{group}/{LATEST}", FileState.of(here / LATEST))
        if self._on_store(group) == named:
            with suppress(FileNotFoundError):
                self._table.add(f"{group}/{LATEST}", FileState.of(here / LATEST))
            gone = [name for name in self._table.names(f"{group}/step-") if name.split("/")[-2] not in steps]
            # Manifests first: without its manifest, the rest is not a checkpoint.
            self._remove(sorted(gone, key=lambda name: not name.endswith(f"/{MANIFEST}")))
        elif named is None and not steps:  # a fetched checkpoint that `latest` does not name is kept
            self._remove([f"{group}/{LATEST}", *self._table.names(f"{group}/step-")])
            self._named[group] = None

    def _put_checkpoint(self, group: str, step: str, counted: Counted) -> bool:
        """Upload one checkpoint, its manifest last; False if it was deleted or replaced here meanwhile."""
        place = f"{group}/{step}"
        with self._hold(self._directory / place) as held:
            if held is None:
                return False
            states = {path.name: FileState.of(path) for path in sorted(held.iterdir())}
            manifest = f"{place}/{MANIFEST}"
            if self._table.has(manifest, states[MANIFEST]):
                return True
            if self._on_store(group) == step:  # same name, other content: the run went back and reached it again
                self._remove([f"{group}/{LATEST}"])
                self._named[group] = None
            if manifest in self._table.names(place):
                self._remove([manifest])
            for name, state in states.items():
                if name != MANIFEST and not self._table.has(f"{place}/{name}", state):
                    self._store.put(held / name, f"{place}/{name}")
                    self._table.add(f"{place}/{name}", state)
                    counted(state.size)
            arrived = Store(self._store.url / place).list()
            wrong = [n for n, s in states.items() if n != MANIFEST and (n not in arrived or arrived[n].size != s.size)]
            if wrong:
                for name in wrong:
                    self._table.drop(f"{place}/{name}")
                raise DataError(f"{self._store.url / place}: {', '.join(wrong)} did not arrive completely")
            self._store.put(held / MANIFEST, manifest)
            self._table.add(manifest, states[MANIFEST])
            counted(states[MANIFEST].size)
            return True

    def _on_store(self, group: str) -> str | None:
        """The name in the store's `latest`."""
        if group not in self._named:
            content = self._store.get_bytes(f"{group}/{LATEST}")
            self._named[group] = None if content is None else content.decode(errors="replace").strip()
        return self._named[group]

    @contextmanager
    def _hold(self, checkpoint: Path) -> Iterator[Path | None]:
        """Hard links to a checkpoint's files, so that none disappears during the upload; None if the checkpoint is
        deleted or replaced."""
        held = self._held / checkpoint.name
        shutil.rmtree(held, ignore_errors=True)
        try:
            before = (checkpoint / MANIFEST).stat()
            shutil.copytree(checkpoint, held, copy_function=_link)
            same = os.path.samestat(before, (checkpoint / MANIFEST).stat())
        except FileNotFoundError:
            same = False
        except shutil.Error as error:
            if checkpoint.is_dir():
                raise DataError(
                    f"{checkpoint}: cannot be linked or copied for its upload ({first_fault(error)})"
                ) from error
            same = False
        try:
            yield held if same else None
        finally:
            shutil.rmtree(held, ignore_errors=True)

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self._store.remove([name])
            self._table.drop(name)


def _is_of(name: str, groups: set[str]) -> bool:
    """Whether a file is part of a checkpoint, or is a `latest`."""
    match = _STEP.fullmatch(name)
    return match is not None or any(name == f"{group}/{LATEST}" for group in groups)


def _link(source: str, target: str) -> None:
    """A hard link to a file, or a copy if the file system has no hard links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)


class BackgroundUpload:
    """Uploads a run in a separate thread until the run ends.

    Args:
        uploader: of the run.
        url: of the run, for messages.
        directory: of the run, for messages.
    """

    def __init__(self, uploader: Uploader, url: str, directory: Path) -> None:
        self._uploader = uploader
        self._url = url
        self._directory = directory
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread was started."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread; a second call does nothing."""
        if self._thread is None:
            log.info("%s is uploaded to %s while it runs", self._directory, self._url)
            self._thread = threading.Thread(target=self._work, name="bertkit-upload", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        newest: tuple[tuple[str, int], ...] | None = None
        next_pass, pause = 0.0, FIRST_PAUSE_SECONDS
        failed = False
        while not self._ending.wait(LOOK_SECONDS):
            is_due = time.monotonic() >= next_pass
            if failed and not is_due:
                continue
            try:
                found = self._uploader.newest()
                if found == newest and not is_due:
                    continue
                self._uploader.upload()
            except TakenOverError as error:
                log.warning("%s", error)
                return
            except (DataError, OSError) as error:
                log.warning("%s; the run continues, and its upload is retried in %.0f seconds", error, pause)
                next_pass, failed = time.monotonic() + pause, True
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                newest, next_pass = found, time.monotonic() + QUIET_SECONDS
                pause, failed = FIRST_PAUSE_SECONDS, False

    def finish(self, progress: Progress, *, attempts: int = LAST_ATTEMPTS) -> None:
        """Upload the rest.

        Raises:
            DataError: the store does not accept it; the message states what is missing there, and where it is.
            TakenOverError: another process has written the run there.
        """
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        left = self._uploader.outstanding()
        done = 0
        with progress(f"uploading to {self._url}", total=sum(left.values()), unit="bytes") as meter:

            def counted(size: int) -> None:
                nonlocal done
                done += size
                meter.update(done)

            for attempt in range(1, attempts + 1):
                try:
                    self._uploader.upload(counted)
                    return
                except TakenOverError:
                    raise
                except (DataError, OSError) as error:
                    if attempt == attempts:
                        raise DataError(self._lacking(error)) from error
                    log.warning("%s; attempt %d of %d follows", error, attempt + 1, attempts)
                    time.sleep(FIRST_PAUSE_SECONDS)

    def _lacking(self, error: Exception) -> str:
        left = self._uploader.outstanding()
        names = ", ".join(list(left)[:3]) + (", ..." if len(left) > 3 else "")
        return (
            f"{error}. {len(left):,} files of the run are missing on the store ({names}); nothing is lost, all files"
            f" are in {self._directory}: `--resume {shell_word(self._url)}` on this machine uploads the rest"
        )
