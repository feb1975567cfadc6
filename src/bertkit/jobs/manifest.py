"""What the jobs of a suite have left on disk: named, hashed where it was made, and checked where it is read.

Own design. A worker returns the hashes of its files; the command reads them again through its own file system. On a
cluster whose machines do not share a directory this is where it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertkit.errors import DataError
from bertkit.files import read_json, sha256_of, write_json
from bertkit.jobs.job import DoneJob

JOBS_FILE = "jobs.json"


def hashes(files: Iterable[Path]) -> dict[str, str]:
    """sha256 of each file by its absolute path: what a job returns."""
    return {str(path.absolute()): sha256_of(path) for path in sorted(files)}


def check_files(done: DoneJob) -> None:
    """Check the files that a job has returned the hashes of.

    Raises:
        DataError: one is missing here, or has other bytes.
    """
    for name, digest in done.value.items():
        path = Path(name)
        if not path.is_file():
            raise DataError(
                f"{done.job.name}: {done.worker} has written {path}, which is not there; all machines must share the"
                " run directory"
            )
        if sha256_of(path) != digest:
            raise DataError(
                f"{path}: is not as {done.worker} wrote it; remove it, and run the command again for {done.job.name}"
            )


def write_manifest(directory: Path, done: Sequence[DoneJob]) -> None:
    """Add jobs to `jobs.json`, by name: worker, attempts, and the files below the directory with their hashes."""
    path = directory / JOBS_FILE
    known: dict[str, Any] = read_json(path) if path.is_file() else {}
    new = {each.job.name: _entry(directory, each) for each in done}
    if new:
        write_json(path, dict(sorted({**known, **new}.items())))


def _entry(directory: Path, done: DoneJob) -> Mapping[str, Any]:
    base = directory.absolute()
    files = {
        path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path): digest
        for path, digest in ((Path(name), digest) for name, digest in done.value.items())
    }
    return {"worker": done.worker, "attempts": done.attempts, "files": files}
