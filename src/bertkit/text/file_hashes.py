"""sha256 of corpus files, remembered between runs.

No paper. A file counts as unchanged while its path, size, time of change and inode are: the rule of make and git.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from bertkit.errors import DataError
from bertkit.files import sha256_of, write_json

MAX_REMEMBERED = 100_000
log = logging.getLogger(__name__)


class FileHashes:
    """A table of hashes kept in one JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        self._changed = False
        if path.is_file():
            try:
                self._known = dict(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError):
                log.warning("%s is damaged; the hashes are computed anew", path)

    def sha256(self, path: Path) -> str:
        """The sha256 of a file's content.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            state = path.stat()
            key = f"{path.resolve()}|{state.st_size}|{state.st_mtime_ns}|{state.st_ino}"
            if key not in self._known:
                self._known[key] = sha256_of(path)
                self._changed = True
        except OSError as fault:
            raise DataError(f"{path}: cannot be read: {fault.strerror or fault}") from fault
        return self._known[key]

    def save(self) -> None:
        """Write the table, if it has grown; the oldest entries go first when it is full."""
        if self._changed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, dict(list(self._known.items())[-MAX_REMEMBERED:]))
            self._changed = False
