"""Windows of examples predicted by the workers of an executor, in their order.

Nothing here follows a paper. A window is predicted in the same batches wherever that is, so the predictions are those
of one process with as many threads. Sibling predict.py makes the windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from bertkit.errors import DataError
from bertkit.jobs.job import Job
from bertkit.jobs.registry import executor_of
from bertkit.jobs.settings import ExecutorSettings
from bertkit.models.model_files import weights_hash

if TYPE_CHECKING:
    from bertkit.inference.predict import PredictedWindow, Predictor
    from bertkit.tasks.examples import Example

_WINDOWS_AHEAD = 2
"""Of each worker: one is computed while another waits."""


def predicted_by_workers(
    predictor: Predictor, windows: Iterable[list[Example | None]], executor: ExecutorSettings
) -> Iterator[PredictedWindow]:
    """Each window with its predictions; every worker reads the model once.

    Raises:
        DataError: see `Predictor`; a worker finds another model at the same path.
    """
    loader = predictor.loader
    assert loader is not None, "of a model directory"
    identity = weights_hash(predictor.directory)
    with executor_of(executor, fresh_process=False) as workers:
        jobs = (
            Job(f"window {number} of examples", partial(_predict_job, loader, identity, window))
            for number, window in enumerate(windows)
        )
        for done in workers.run(jobs, ordered=True, ahead=_WINDOWS_AHEAD):
            yield done.value


def _predict_job(loader: Callable[[], Predictor], identity: str, window: list[Example | None]) -> PredictedWindow:
    """A window on a worker.

    Raises:
        DataError: the worker finds another model at the same path.
    """
    if identity not in _loaded:
        predictor = loader()
        if weights_hash(predictor.directory) != identity:
            raise DataError(
                f"{predictor.directory}: a worker finds another model there; all machines must read the same files"
            )
        _loaded[identity] = predictor
    return _loaded[identity].predicted_window(window)


_loaded: dict[str, Predictor] = {}
"""A worker's models by the hash of their weights; a worker serves one command."""
