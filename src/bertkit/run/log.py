"""log.txt: everything that the package logs while a run is recorded, with UTC times.

Nothing here follows a paper. Unlike logging's own file handler it treats a full disk as lost lines, never as a
traceback on the user's screen: what the run must not lose is in the checkpoints.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path


class LogFile(logging.FileHandler):
    """A handler of the package's logger, attached from construction until `detach`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        formatter.converter = time.gmtime
        self.setFormatter(formatter)
        self._complained = False
        self._logger = logging.getLogger("bertkit")
        self._level_before = self._logger.level
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)

    def detach(self) -> None:
        """Stop logging to the file and close it."""
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level_before)
        try:
            self.close()
        except OSError as error:
            self._complain(error)

    def note(self, level: int, text: str) -> None:
        """A line for this file alone."""
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
            print(f"warning: {self.baseFilename} cannot be written ({error}); lines are lost", file=sys.stderr)
