"""The log of a run, `log.txt`: all lines of the package's logger, from when a run is opened until it is closed.

Not from a paper. A disk that is full ends the log, not the run.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

from bertkit.files import private_opener
from bertkit.visible import visible_lines


class LogFile(logging.FileHandler):
    """A handler of the package's logger, attached from construction until `detach`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        formatter.converter = time.gmtime
        self.setFormatter(formatter)
        self._complained = False
        self._logger = logging.getLogger("bertkit")
        self._level_before = self._logger.level
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=private_opener)

    def detach(self) -> None:
        """Stop logging to the file and close it."""
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level_before)
        try:
            self.close()
        except OSError as error:
            self._complain(error)

    def format(self, record: logging.LogRecord) -> str:
        return visible_lines(super().format(record))

    def note(self, level: int, text: str) -> None:
        """Write a line to this file only."""
        self.handle(self._logger.makeRecord(__name__, level, __file__, 0, text, (), None))

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._complain(error)
        else:
            super().handleError(record)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            print(f"warning: {self.baseFilename} cannot be written ({error}); log lines are lost", file=sys.stderr)
