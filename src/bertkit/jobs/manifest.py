"""The files that a suite's jobs wrote: listed, hashed where they were made, and checked where they are read.

Not from a paper. A worker returns the hashes of its files; the command reads the files again through its own file
system. This detects machines of a cluster that do not share the directory.
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
    """sha256 of each file by its absolute path, as returned by a job."""
    return {str(path.absolute()): sha256_of(path) for path in sorted(files)}


def check_files(done: DoneJob) -> None:
    """Check the files for which a job has returned hashes.

    Raises:
        DataError: a file is missing here, or has another content.
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
                f"{path}: differs from what {done.worker} wrote; remove it and run the command again for"
                f" {done.job.name}"
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
