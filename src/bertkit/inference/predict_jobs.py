"""Windows of examples predicted by the workers of an executor, in order.

Not from a paper. A window is predicted in the same batches on every worker, so the predictions equal those of one
process with as many threads. Sibling predict.py makes the windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from bertkit.errors import DataError
from bertkit.jobs.job import Job
from bertkit.jobs.registry import executor_of
from bertkit.jobs.settings import ExecutorSettings
from bertkit.models.files.model_files import weights_hash
from bertkit.tasks.base import Prediction
from bertkit.tasks.examples import Example

_WINDOWS_AHEAD = 2
"""Per worker: one window is computed while another waits."""


@dataclass(frozen=True)
class PredictedWindow:
    """Examples predicted together.

    Attributes:
        examples: None for a blank line.
        predictions: of the examples that are not None, in order.
        cut: how many of them were cut to the model's maximum length.
    """

    examples: list[Example | None]
    predictions: list[Prediction]
    cut: int


class WindowPredictor(Protocol):
    """The interface of a predicting model that workers use."""

    @property
    def directory(self) -> Path:
        """Path of the model."""

    def predicted_window(self, window: list[Example | None]) -> PredictedWindow:
        """The predictions of some examples."""


def predicted_by_workers(
    load: Callable[[], WindowPredictor],
    identity: str,
    windows: Iterable[list[Example | None]],
    executor: ExecutorSettings,
) -> Iterator[PredictedWindow]:
    """Each window with its predictions; every worker reads the model once.

    Args:
        load: reads the model.
        identity: the hash of its weights.
        windows: the examples.
        executor: of the workers.

    Raises:
        DataError: see `Predictor`; or a worker finds a different model at the same path.
    """
    with executor_of(executor, fresh_process=False) as workers:
        jobs = (
            Job(f"window {number} of examples", partial(_predict_job, load, identity, window))
            for number, window in enumerate(windows)
        )
        for done in workers.run(jobs, ordered=True, ahead=_WINDOWS_AHEAD):
            yield done.value


def _predict_job(load: Callable[[], WindowPredictor], identity: str, window: list[Example | None]) -> PredictedWindow:
    """A window on a worker.

    Raises:
        DataError: the worker finds a different model at the same path.
    """
    if identity not in _loaded:
        predictor = load()
        if weights_hash(predictor.directory) != identity:
            raise DataError(
                f"{predictor.directory}: a worker found different weights here; all machines must read the same files"
            )
        _loaded[identity] = predictor
    return _loaded[identity].predicted_window(window)


_loaded: dict[str, WindowPredictor] = {}
"""A worker's models by the hash of their weights; a worker serves one command."""
