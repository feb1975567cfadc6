"""Several runs of a study in parallel, each in a process of its own on this machine.

Own design. A process writes its result to disk, as a run without parallel jobs does. A signal to the command reaches
every process, which saves a checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from bertkit.errors import BertkitError, DataError, StoppedError
from bertkit.progress import silent_progress
from bertkit.study.study_runs import StudyRun
from bertkit.study.workplace import Workplace
from bertkit.training.interrupt import StopRequest

_POLL_SECONDS = 0.2


def carry_out_together(
    workplace: Workplace,
    study_runs: Sequence[tuple[StudyRun, int]],
    jobs: int,
    started: Callable[[StudyRun, int], None] = lambda study_run, steps: None,
) -> None:
    """Carry out runs, each with its number of steps, `jobs` at a time.

    Args:
        workplace: where.
        study_runs: in the order in which they are started.
        jobs: processes at a time, which share the cores.
        started: called before each.

    Raises:
        StoppedError: a signal or the time limit came first; the runs have saved checkpoints.
        BertkitError: the first error of a run; the others are stopped.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // jobs)
    waiting = list(study_runs)
    running: dict[SpawnProcess, tuple[StudyRun, Connection]] = {}
    with StopRequest(workplace.minutes_left()) as request:
        try:
            while waiting or running:
                if request.reason is not None:
                    raise StoppedError(f"stopped by {request.reason}, checkpoints saved")
                while waiting and len(running) < jobs:
                    study_run, steps = waiting.pop(0)
                    started(study_run, steps)
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(
                        target=_run_in_process, args=(workplace, study_run, steps, threads, sender)
                    )
                    process.start()
                    sender.close()
                    running[process] = (study_run, receiver)
                wait([process.sentinel for process in running], timeout=_POLL_SECONDS)
                for process in [each for each in running if not each.is_alive()]:
                    _raise_error_of(process, *running.pop(process))
        finally:
            for process in running:
                process.terminate()  # SIGTERM: a training run saves a checkpoint
            for process in running:
                process.join()


def _raise_error_of(process: SpawnProcess, study_run: StudyRun, receiver: Connection) -> None:
    process.join()
    if process.exitcode == 0:
        return
    error: Any = None
    if receiver.poll():
        try:
            error = receiver.recv()
        except EOFError:
            error = None
    if isinstance(error, BertkitError):
        raise error
    raise DataError(
        f"{study_run.name}: its process ended with code {process.exitcode}"
        f"{'' if error is None else f' ({error})'}; its log.txt may say why; with less memory take fewer --jobs"
    )


def _run_in_process(workplace: Workplace, study_run: StudyRun, steps: int, threads: int, sender: Connection) -> None:
    """The body of a worker process."""
    import torch

    torch.set_num_threads(threads)
    try:
        workplace.carry_out(study_run, steps, progress=silent_progress)
    except BertkitError as error:
        sender.send(error)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        sender.send(StoppedError(f"interrupted in {study_run.name}"))
        raise SystemExit(StoppedError.exit_code) from None
    except Exception as bug:
        sender.send(f"{type(bug).__name__}: {bug}")
        raise
