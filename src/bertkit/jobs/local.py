"""Jobs in processes on this machine.

Not from a paper; built on multiprocessing. Each run has its own process, so its memory is freed and no state is left
for the next job. Many short jobs share a process, which keeps what they load. A signal to the command reaches every
process, which saves a checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from bertkit.errors import StoppedError
from bertkit.jobs.executor import Executor, WorkerLostError
from bertkit.jobs.job import Job, Place, Reply, reply_of, threads_of

_TOLD = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals that mean "stop". A worker that is killed by another signal is lost."""


@dataclass(frozen=True, eq=False)
class _Worker:
    process: SpawnProcess
    connection: Connection


class LocalExecutor(Executor[_Worker]):
    """See the module docstring.

    Args:
        jobs: number of jobs at a time.
        fresh_process: run each job in its own process.
    """

    def __init__(self, jobs: int, *, fresh_process: bool = True) -> None:
        super().__init__(jobs, threads_of(jobs))
        self._context = multiprocessing.get_context("spawn")
        self._fresh_process = fresh_process
        self._idle: list[_Worker] = []

    def __exit__(self, *error: object) -> None:
        self._end([])

    def _submit(self, job: Job) -> _Worker:
        worker = self._idle.pop() if self._idle else self._started()
        with suppress(BrokenPipeError, ConnectionResetError):  # it is gone: `_reply` detects that
            worker.connection.send(job)
        return worker

    def _started(self) -> _Worker:
        own, its = self._context.Pipe()
        process = self._context.Process(target=_work, args=(self.place, its, self._fresh_process))
        process.start()
        its.close()
        return _Worker(process, own)

    def _finished(self, handles: Sequence[_Worker], seconds: float) -> list[_Worker]:
        ready = wait([each for worker in handles for each in (worker.connection, worker.process.sentinel)], seconds)
        return [worker for worker in handles if worker.connection in ready or worker.process.sentinel in ready]

    def _reply(self, handle: _Worker) -> Reply:
        reply: Reply | None = None
        with suppress(EOFError, OSError):  # also killed in the middle of its reply
            if handle.connection.poll():
                reply = handle.connection.recv()
        if reply is not None and not self._fresh_process:
            self._idle.append(handle)
            return reply
        handle.connection.close()  # ends a worker that has nothing to do
        handle.process.join()
        if reply is not None:
            return reply
        code = handle.process.exitcode or 0
        if -code in _TOLD:
            raise StoppedError(f"process {handle.process.pid} was stopped by {signal.Signals(-code).name}")
        raise WorkerLostError(f"process {handle.process.pid} ended with code {code}")

    def _end(self, handles: Sequence[_Worker]) -> None:
        for worker in handles:
            worker.process.terminate()  # SIGTERM: a training run saves a checkpoint
        for worker in [*handles, *self._idle]:
            worker.connection.close()  # one that has saved its checkpoint would wait for the next job
            worker.process.join()
        self._idle.clear()


def _work(place: Place, connection: Connection, heeds_interrupt: bool) -> None:
    """The body of a worker process: receive jobs and send replies until there are no more.

    Ctrl-C reaches the whole process group: a run saves a checkpoint; short jobs are stopped by the command.
    """
    if not heeds_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        while True:
            job = connection.recv()
            connection.send(reply_of(job, place))


def _stop_with_parent() -> None:
    """Stop, with a checkpoint, when the command is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
