"""A run as a rank has it that does not write it: it reads the run's checkpoints, and writes into a scratch directory.

Own design. All ranks execute the same code; what it writes into the run's directory (log lines, predictions, records of
a method) only the first rank's copy is kept of. Sibling directory.py is the run itself.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertkit.errors import DataError
from bertkit.run.directory import RECIPE, RunDirectory
from bertkit.run.lock import LOCK_FILE
from bertkit.run.metrics import METRICS_FILE

_NOT_COPIED = {LOCK_FILE, METRICS_FILE, "log.txt"}


class FollowedRun(RunDirectory):
    """The run that the first rank writes.

    Attributes:
        path: the scratch directory, with a copy of the run's small files; removed at the end of `recording`.
        leader: the run's directory.

    Args:
        leader: a directory that this rank must see, too.

    Raises:
        DataError: it does not.
    """

    def __init__(self, leader: Path) -> None:
        if not (leader / RECIPE).is_file():
            raise DataError(
                f"{leader}: the first rank writes the run there, and this rank does not see it; give --run-dir on a"
                " file system that all machines share"
            )
        super().__init__(Path(tempfile.mkdtemp(prefix="bertkit-rank-")), RunDirectory.open(leader).record)
        self.leader = leader

    @property
    def checkpoints(self) -> Path:
        return self.leader / "checkpoints"

    @property
    def tensorboard(self) -> None:
        return None

    def update(self, **fields: Any) -> None:
        self.record.update(fields)

    def write_environment(self) -> None:
        """Nothing: that of the first rank is kept."""

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Nothing: those of the first rank are the same."""

    def seal_model(self) -> None:
        """Nothing."""

    def seal_growing_files(self) -> None:
        """Nothing."""

    @contextmanager
    def recording(self, command: Sequence[str] | None = None) -> Iterator[None]:
        """The scratch directory is there while the body runs."""
        for path in self.leader.iterdir():
            if path.is_file() and path.name not in _NOT_COPIED:
                shutil.copy(path, self.path)
        try:
            yield
        finally:
            shutil.rmtree(self.path, ignore_errors=True)
