"""The run as seen by a rank that does not write it: reads the run's checkpoints, writes into a scratch directory.

Not from a paper. All ranks execute the same code; of what it writes into the run's directory (log lines, predictions,
records of a method), only the first rank's copy is kept. Sibling directory.py is the run itself.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bertkit.errors import DataError
from bertkit.run.directory import RECIPE, RunDirectory
from bertkit.run.lock import LOCK_FILE
from bertkit.run.metrics import METRICS_FILE

_NOT_COPIED = {LOCK_FILE, METRICS_FILE, "log.txt"}


class ReadOnlyRun(RunDirectory):
    """The run that the first rank writes.

    Attributes:
        path: the scratch directory, with a copy of the run's small files; removed at the end of `recording`.
        leader: the run's directory.

    Args:
        leader: the run's directory, which must be visible to this rank, too.

    Raises:
        DataError: it is not visible.
    """

    def __init__(self, leader: Path) -> None:
        if not (leader / RECIPE).is_file():
            raise DataError(
                f"{leader}: the first rank writes the run there, but this rank cannot see it; give a --run-dir on a"
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
        """Does nothing: the first rank's is kept."""

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Does nothing: the first rank's results are the same."""

    def seal_model(self) -> None:
        """Does nothing."""

    def seal_growing_files(self) -> None:
        """Does nothing."""

    @contextmanager
    def recording(self, command: Sequence[str] | None = None) -> Iterator[None]:
        """Keep the scratch directory while the body runs."""
        for path in self.leader.iterdir():
            if path.name not in _NOT_COPIED and path.is_file():
                with suppress(FileNotFoundError):  # the first rank is replacing it at this moment
                    shutil.copy(path, self.path)
        try:
            yield
        finally:
            shutil.rmtree(self.path, ignore_errors=True)
