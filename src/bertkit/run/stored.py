"""Runs on a store: `--run-dir s3://BUCKET/RUN` and `--resume s3://BUCKET/RUN`.

Not from a paper. A run is computed in a working copy below the cache, at a path derived from the URL, and uploaded
while it runs (uploading.py). A run on the store is fetched before it is resumed: its small files and the newest intact
checkpoint. The store has no locks, so only one machine at a time may write a run there; a machine that finds that
another one has written stops uploading.

    CACHE/stored-runs/DIGEST/
      NAME/             the run directory; NAME is the last part of the URL
      uploaded.json     which of its files are on the store
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from bertkit.cache import WORKING_COPIES
from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.files import cache_directory, read_json, write_text
from bertkit.json_input import parse_json
from bertkit.progress import Progress, silent_progress
from bertkit.ranks import TorchrunEnvironment
from bertkit.run import NEWEST, UPLOADED
from bertkit.run.checkpoint import LATEST, STATE, checkpoint_errors, checkpoint_name
from bertkit.run.directory import RECORD, SUITE_FILE
from bertkit.run.lock import is_locked
from bertkit.run.uploading import BackgroundUpload, FileState, Uploader, UploadTable
from bertkit.stores.fetch import check_online, fetch_into
from bertkit.stores.store import Store, StoredFile
from bertkit.stores.url import StoreUrl, has_scheme
from bertkit.visible import shell_word

Expected = Literal["new", "run", "either"]
_CHECKPOINTS = "checkpoints"

log = logging.getLogger(__name__)


class StoredRun:
    """A run on a store and its working copy.

    Attributes:
        url: of the run.
        path: of the working copy, which need not exist.
    """

    def __init__(self, url: StoreUrl, cache: Path) -> None:
        if not url.name:
            raise UsageError(f"{url}: does not name a run; give a directory below it")
        self.url = url
        home = cache / WORKING_COPIES / url.digest
        self.path = home / url.name
        self._table = UploadTable(home / UPLOADED, str(url))

    @classmethod
    def named_by(cls, name: str | None, cache: Path) -> StoredRun | None:
        """The run that a URL or the path of a working copy names; None for any other name.

        Raises:
            UsageError: the scheme is another, or the URL is not valid.
        """
        if name is None or name == NEWEST:
            return None
        if has_scheme(name):
            return cls(StoreUrl.parse(name), cache)
        path = Path(name).expanduser().absolute()
        if path.parent.parent == (cache / WORKING_COPIES).absolute() and (path.parent / UPLOADED).is_file():
            return cls(StoreUrl.parse(str(read_json(path.parent / UPLOADED).get("url"))), cache)
        return None

    def uploader(self) -> BackgroundUpload:
        """The upload of the working copy."""
        return BackgroundUpload(Uploader(self.path, Store(self.url), self._table), str(self.url), self.path)

    def open(self, expected: Expected, progress: Progress = silent_progress) -> None:
        """Bring the working copy up to date with the store.

        Args:
            expected: a run to continue ("run"), a new or finished run ("new"), or either of them.
            progress: shows the bytes that are fetched.

        Raises:
            UsageError: the place of a new run contains a run or other files; the working copy is being written.
            DataError: there is no run to resume, or the store cannot be read.
        """
        if is_locked(self.path):
            raise UsageError(f"{self.url}: another process on this machine is writing this run ({self.path})")
        store = Store(self.url)
        record = store.get_bytes(RECORD)
        if record is None:
            self._open_unstored(store, expected)
        elif not self._is_here or not self._table.wrote(record):
            self._require_free(record, expected)
            self._set_aside()
            self._fetch(store, record, progress)
        else:
            self._require_free(record, expected)

    @property
    def _is_here(self) -> bool:
        return (self.path / RECORD).is_file()

    def _open_unstored(self, store: Store, expected: Expected) -> None:
        """The store contains nothing, or only the beginning of a run."""
        if self._is_here:
            log.info("%s has no run yet; uploading the working copy %s", self.url, self.path)
            self._table.forget()
            return
        if expected == "run":
            raise DataError(f"{self.url}: there is no run here (it has no {RECORD})")
        if found := sorted(store.list()):
            raise UsageError(f"{self.url}: contains other files ({', '.join(found[:3])}); give a new --run-dir")
        self._table.forget()
        self._table.save()

    def _require_free(self, record: bytes, expected: Expected) -> None:
        """Raise UsageError if a new run would overwrite an unfinished one."""
        if expected == "new" and _parsed(record, self.url).get("status") != "done":
            raise UsageError(
                f"{self.url}: already contains a run; continue with `--resume {shell_word(self.url)}`, or name another"
                " --run-dir"
            )

    def _set_aside(self) -> None:
        """The store's run was written elsewhere: delete the working copy, or rename it if it has files not uploaded."""
        if not self.path.exists():
            return
        if self._is_here and Uploader(self.path, Store(self.url), self._table).outstanding():
            free = next(
                path for n in count(1) if not (path := self.path.with_name(f"{self.path.name}.aside-{n}")).exists()
            )
            self.path.rename(free)
            log.warning("%s was written from elsewhere; files not yet uploaded are kept in %s", self.url, free)
        else:
            shutil.rmtree(self.path)

    def _fetch(self, store: Store, record: bytes, progress: Progress) -> None:
        """Create the working copy from the store."""
        files = store.list()
        is_done = _parsed(record, self.url).get("status") == "done"
        of_checkpoints = {name for name in files if f"/{_CHECKPOINTS}/" in f"/{name}"}
        # The model that a suite links to is fetched with its run, and linked again.
        left_out = {name for name in files if SUITE_FILE in files and name.startswith("model/") and not is_done}
        writing = self.path.with_name(f".{self.path.name}.writing")
        shutil.rmtree(writing, ignore_errors=True)
        wanted = {name: file for name, file in files.items() if name not in of_checkpoints | left_out}
        fetch_into(store, wanted, writing, progress=progress)
        if not is_done:
            for group in sorted({name.partition(f"{_CHECKPOINTS}/")[0] + _CHECKPOINTS for name in of_checkpoints}):
                _fetch_newest_checkpoint(store, files, writing, group, progress)
        writing.rename(self.path)
        self._table.forget()
        for name, file in files.items():
            here = self.path / name
            # Files that are not fetched are listed too, so that they are removed when the run would remove them.
            self._table.add(name, FileState.of(here) if here.is_file() else FileState(file.size, 0))
        self._table.about_to_write(record)
        log.info("%s is fetched into %s", self.url, self.path)


def _fetch_newest_checkpoint(
    store: Store, files: Mapping[str, StoredFile], directory: Path, group: str, progress: Progress
) -> None:
    """Fetch the newest intact checkpoint, and the one that the run would go back to.

    Raises:
        DataError: there are checkpoints, but all of them are damaged.
    """
    content = store.get_bytes(f"{group}/{LATEST}") if f"{group}/{LATEST}" in files else None
    named = None if content is None else content.decode(errors="replace").strip()
    steps = sorted(
        {name.removeprefix(f"{group}/").partition("/")[0] for name in files if name.startswith(f"{group}/step-")}
    )
    older = [step for step in steps if named is None or step <= named][::-1]
    errors: list[str] = []
    for step in older + [step for step in steps if step not in older][::-1]:
        place = f"{group}/{step}"
        _fetch_checkpoint(store, files, directory, place, progress)
        found = checkpoint_errors(directory / place)
        if not found:
            if errors:
                log.warning("the older checkpoint %s was fetched, because %s", store.url / place, "; ".join(errors))
            if step == named:
                write_text(directory / group / LATEST, f"{named}\n")
            sound = read_json(directory / place / STATE).get("last_sound")
            if isinstance(sound, int) and checkpoint_name(sound) in steps:
                _fetch_checkpoint(store, files, directory, f"{group}/{checkpoint_name(sound)}", progress)
            return
        errors += [error.replace(str(directory), str(store.url)) for error in found]
        shutil.rmtree(directory / place)
    if errors:
        raise DataError(f"no checkpoint of {store.url / group} can be used: {'; '.join(errors)}")


def _fetch_checkpoint(
    store: Store, files: Mapping[str, StoredFile], directory: Path, place: str, progress: Progress
) -> None:
    own = {name: file for name, file in files.items() if name.startswith(f"{place}/")}
    fetch_into(store, own, directory, progress=progress)


def _parsed(record: bytes, url: StoreUrl) -> dict[str, Any]:
    value = parse_json(record, str(url / RECORD))
    if not isinstance(value, dict):
        raise DataError(f"{url / RECORD}: expected a JSON object; the file is damaged")
    return value


class RunLocation:
    """Where a command's run is, given as URLs or paths; a context manager that is open while the command runs.

    Args:
        run_dir: the value of `--run-dir`.
        resume: the value of `--resume`.
        offline: use no network.
        progress: shows the bytes that are fetched and uploaded.

    Attributes:
        run_dir: the directory that the run is written to; None: under the runs' root.
        resume: path or name of the run to resume.
    """

    def __init__(
        self,
        run_dir: str | None,
        resume: str | None,
        *,
        offline: bool = False,
        progress: Progress = silent_progress,
    ) -> None:
        source, target = (StoredRun.named_by(name, cache_directory()) for name in (resume, run_dir))
        directory = None if run_dir is None else Path(run_dir)
        self.run_dir = directory if target is None else target.path
        self.resume = resume if source is None else str(source.path)
        self._source, self._target = source, target
        self._stored = source if run_dir is None else target  # a run resumed in place stays there
        self._expected: Expected = "run" if resume == NEWEST else "new" if resume is None else "either"
        self._offline = offline
        self._progress = progress
        self._upload: BackgroundUpload | None = None

    def begin(self) -> None:
        """Start the upload, together with the run's training."""
        if self._upload is not None:
            self._upload.start()

    def complete(self) -> None:
        """After the run is done: wait for its upload.

        Raises:
            DataError: the store does not accept all of it.
            StoppedError: the user interrupts the upload.
        """
        if self._upload is not None:
            try:
                self._upload.finish(self._progress)
            except KeyboardInterrupt:
                raise StoppedError(f"the upload to {self._url} was interrupted", self._remedy) from None

    def shown(self, path: Path) -> str:
        """A path of the run as shown to the user: the store's URL, if the run is on a store."""
        if self._stored is not None and path.absolute().is_relative_to(self._stored.path.absolute()):
            below = path.absolute().relative_to(self._stored.path.absolute()).as_posix()
            return str(self._stored.url if below == "." else self._stored.url / below)
        return str(path)

    def __enter__(self) -> Self:
        """Fetch what is on a store.

        Raises:
            UsageError, DataError: see `StoredRun.open`; also if the network is needed but may not be used.
        """
        launch = TorchrunEnvironment.of_environment()
        if launch is not None and launch.rank != 0:
            return self  # the first rank fetches and uploads
        source, target = self._source, self._target
        for stored in (source, target):
            if stored is not None:
                check_online(stored.url, self._offline)
        if source is not None:
            source.open("run", self._progress)
        if target is not None and (source is None or target.url != source.url):
            is_again = launch is not None and launch.restart > 0
            target.open("either" if is_again and self._expected == "new" else self._expected, self._progress)
        if self._stored is not None:
            self._upload = self._stored.uploader()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Upload what a stopped or failed run has written so far. A refusal, and how to continue, name the store, not
        the working copy.

        Raises:
            DataError: the run was stopped and the store does not accept its checkpoint.
        """
        if isinstance(error, UsageError | StoppedError) and self._stored is not None:
            error.args = (str(error).replace(str(self._stored.path), self._url),)
        if self._upload is None or not self._upload.is_running or error is None:
            return
        try:
            self._upload.finish(self._progress, attempts=1)
        except DataError as refused:
            if isinstance(error, StoppedError):
                raise DataError(f"{error.reason}; {refused}") from error
            log.warning("%s", refused)

    @property
    def _url(self) -> str:
        return "" if self._stored is None else str(self._stored.url)

    @property
    def _remedy(self) -> str:
        return f"`--resume {shell_word(self._url)}` on this machine uploads the rest"
