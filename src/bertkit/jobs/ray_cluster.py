"""Jobs as tasks of a Ray cluster, each in a fresh process of one of its machines.

Moritz et al. 2018, Ray, arXiv:1712.05889; the library is the extra `ray`. RAY_ADDRESS names a cluster; without it one
is started on this machine for the duration of the command. All machines must see the run directory, the data and the
cache.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Self

from bertkit.errors import DataError, StoppedError, UsageError, first_line
from bertkit.files import without_credentials
from bertkit.jobs.executor import Executor, WorkerLostError
from bertkit.jobs.job import Job, Place, Reply, Value, reply_of, threads_of

ADDRESS = "RAY_ADDRESS"
_CONNECT_SECONDS = 5.0
_STOP_SECONDS = 120.0
"""Time for jobs to save a checkpoint before they are left to Ray."""
_PASSED_ON = ("BERTKIT_", "HF_", "TOKENIZERS_", "WANDB_", "MLFLOW_")
"""Prefixes of the variables that are passed to a cluster's workers."""
_KEPT = re.compile("TOKEN(?!IZERS_)|SECRET|KEY|PASSWORD|WANDB_SERVICE")
"""Parts of the names of variables that are not: credentials, and the port of W&B's process on this machine."""

log = logging.getLogger(__name__)


class RayExecutor(Executor[Any]):
    """See the module docstring.

    Args:
        jobs: number of jobs at a time.
        fresh_process: run each job in its own process; else processes are reused, for many short jobs.

    Raises:
        UsageError: Ray is not installed.
        DataError: the cluster cannot be reached.
    """

    def __init__(self, jobs: int, *, fresh_process: bool = True) -> None:
        try:
            import ray
        except ImportError as error:
            raise UsageError(
                "engine.executor: ray is not installed; pip install 'bertkit[ray]', or take engine.executor=local with"
                " --jobs N for processes of this machine"
            ) from error
        super().__init__(jobs, threads_of(jobs))
        self._ray = ray
        self._fresh_process = fresh_process
        self._messages = ExitStack()

    def __enter__(self) -> Self:
        ray, address = self._ray, os.environ.get(ADDRESS)
        if ray.is_initialized():
            raise UsageError("engine.executor: this process already uses Ray; call ray.shutdown() first")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to Ray's developers
        common = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            ray.init(address="local", num_cpus=self.jobs * self.place.threads, **common)
        else:
            _require_reachable(address)
            common.pop("include_dashboard")
            try:
                ray.init(address=address, runtime_env={"env_vars": _passed_on()}, **common)
            except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise DataError(
                    f"{_out_of_reach(address, first_line(error))}; if the cluster requires a token, set"
                    " RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN if the token is not in ~/.ray/auth_token"
                ) from error
            try:
                self._require_cores()
            except UsageError:
                ray.shutdown()
                raise
        self._messages.enter_context(_messages_logged(ray._private.worker))
        self._task = ray.remote(num_cpus=self.place.threads, max_retries=0, max_calls=1 if self._fresh_process else 0)(
            _work
        )
        log.info("Ray: %d jobs at a time, %d threads each, at %s", self.jobs, self.place.threads, address or "local")
        return self

    def __exit__(self, *error: object) -> None:
        with self._messages:
            self._ray.shutdown()

    def _require_cores(self) -> None:
        largest = max((each["Resources"].get("CPU", 0) for each in self._ray.nodes() if each["Alive"]), default=0)
        if largest < self.place.threads:
            raise UsageError(
                f"a job has {self.place.threads} threads, but no machine of the cluster has more than"
                f" {largest:.0f} cores; set OMP_NUM_THREADS to fewer"
            )

    def share(self, value: Value) -> Callable[[], Value]:
        return _Shared(self._ray.put(value))

    def _submit(self, job: Job) -> Any:
        return self._task.options(name=job.name).remote(job, self.place)

    def _finished(self, handles: Sequence[Any], seconds: float) -> list[Any]:
        ready: list[Any] = self._ray.wait(handles, num_returns=1, timeout=seconds)[0]
        return ready

    def _reply(self, handle: Any) -> Reply:
        errors = self._ray.exceptions
        lost = (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
            errors.LocalRayletDiedError,
        )
        try:
            reply: Reply = self._ray.get(handle)
        except lost as error:
            raise WorkerLostError(type(error).__name__) from error
        except errors.TaskCancelledError as error:
            raise StoppedError("a job was cancelled") from error
        except errors.RayError as error:
            raise DataError(
                f"Ray: a worker cannot start its job ({first_line(error)}); install the same bertkit on every machine"
            ) from error
        return reply

    def _end(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self._ray.cancel(handle, force=False)  # as SIGINT: a training run saves a checkpoint
        if handles:
            self._ray.wait(list(handles), num_returns=len(handles), timeout=_STOP_SECONDS)


@dataclass(frozen=True)
class _Shared(Generic[Value]):
    """A value in Ray's object store; each worker reads it once."""

    reference: Any

    def __call__(self) -> Value:
        import ray

        key = self.reference.hex()
        if key not in _read:
            _read[key] = ray.get(self.reference)
        found: Value = _read[key]
        return found


_read: dict[str, Any] = {}


def _work(job: Job, place: Place) -> Reply:
    """A task of Ray."""
    return reply_of(job, place)


@contextmanager
def _messages_logged(worker: Any) -> Iterator[None]:
    """Log messages about the cluster, such as a lost worker. Ray prints them to stdout, which is for the result, and no
    argument of ray.init changes that.

    Args:
        worker: the module ray._private.worker.
    """

    def logged(data: dict[str, Any], **_: object) -> None:
        for line in data["lines"]:
            log.warning("Ray: %s", line)

    printing = getattr(worker, "print_to_stdstream", None)  # a private name, which a later Ray may not have
    worker.print_to_stdstream = logged
    try:
        yield
    finally:
        worker.print_to_stdstream = printing


def _require_reachable(address: str) -> None:
    """Raise DataError if nothing listens at the address: Ray itself would retry for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # auto: Ray looks for one started by `ray start` on this machine
    if not port.isdecimal():
        raise UsageError(f"{ADDRESS}={address}: expected HOST:PORT, ray://HOST:PORT or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise DataError(_out_of_reach(address, str(error))) from error


def _out_of_reach(address: str, why: str) -> str:
    return (
        f"{ADDRESS}={address}: no Ray cluster answers there ({why}); start one with `ray start --head --port=6379`, or"
        f" unset {ADDRESS} to use this machine"
    )


def _passed_on() -> dict[str, str]:
    """Variables for the workers, without tokens, which Ray would show to anyone with access to the cluster."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PASSED_ON) and not _KEPT.search(name) and without_credentials(value) == value
    }
