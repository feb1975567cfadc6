"""Training by several processes: `--nproc N` starts torchrun's agent for this machine; started processes join it.

What the ranks do together is in training/rank_group.py; heavy modules are imported here only when needed.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from bertkit.cli.console import console
from bertkit.errors import BertkitError, StoppedError
from bertkit.openmp import threads_are_given, usable_cores
from bertkit.ranks import Ranks, RanksNeededError, TorchrunEnvironment, use_ranks
from bertkit.run import NEWEST

if TYPE_CHECKING:
    from bertkit.training.run import FinishedRun, RunArguments

Request = TypeVar("Request", bound="RunArguments[Any]")

_EXIT_FILE = "BERTKIT_EXIT_FILE"
"""Where the first rank writes its exit code for the process that started it."""

_SHUTDOWN_SECONDS = 120
"""Time that the first rank has to write a checkpoint after losing another rank, before the remaining ones are
killed."""


def trained(request: Request, train: Callable[[Request], FinishedRun]) -> FinishedRun | None:
    """Train with as many processes as the recipe requests; returns the finished run, or None on all ranks except the
    first.

    Args:
        request: the command's request.
        train: the function that trains.

    Raises:
        typer.Exit: other processes did the work and ended with this exit code.
        StoppedError: see `start_ranks`.
    """
    launch = TorchrunEnvironment.of_environment()
    if launch is None:
        try:
            return train(request)
        except RanksNeededError as needed:
            count = needed.count
        raise typer.Exit(start_ranks(count))
    from bertkit.training.rank_group import joined

    console.set_rank(launch.rank)
    try:
        with joined(launch) as ranks, use_ranks(ranks):
            finished = train(_restarted(request, launch, ranks))
    except BertkitError as error:
        if launch.rank == 0 and _EXIT_FILE in os.environ:
            Path(os.environ[_EXIT_FILE]).write_text(str(error.exit_code), encoding="ascii")
        raise
    return finished if launch.rank == 0 else None


def _restarted(request: Request, launch: TorchrunEnvironment, ranks: Ranks) -> Request:
    """The request; after a restart by torchrun, changed to resume the run."""
    if launch.restart == 0 or request.resume is not None or not ranks.from_first(lambda: _has_begun(request)):
        return request
    return replace(request, resume=NEWEST, fresh=False)


def _has_begun(request: RunArguments[Any]) -> bool:
    from bertkit.run.directory import RECORD
    from bertkit.run.find import find_runs

    if request.run_dir is not None:
        return (request.run_dir / RECORD).is_file()
    name, kind = request.requested().name, request.kind
    runs = find_runs(request.runs_root)
    return any((run.record["recipe"], run.record["kind"]) == (name, kind) and run.status != "done" for run in runs)


def start_ranks(count: int) -> int:
    """Run this command in this many processes on this machine and wait for them; returns the exit code.

    torchrun's agent starts them, forwards signals, and ends all of them if one ends.

    Raises:
        StoppedError: the first rank was killed, so it has not reported anything.
    """
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    for name in [each for each in logging.root.manager.loggerDict if each.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what happened is reported here
    if not threads_are_given():
        os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // count))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        shutdown_timeout=int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_SECONDS)),
    )
    with tempfile.TemporaryDirectory(prefix="bertkit-") as directory:
        exit_file = Path(directory) / "exit"
        os.environ[_EXIT_FILE] = str(exit_file)
        killed = None
        try:
            launch_agent(config, sys.executable, [*_program(), *sys.argv[1:]])
        except ChildFailedError as failed:
            code, killed = _end_of(failed)
        except SignalException as stopped:
            code = 128 + int(stopped.sigval)
        else:
            return 0
        reported = None
        with suppress(OSError, ValueError):
            reported = int(exit_file.read_text(encoding="ascii"))
        if killed is None:
            return code if reported is None else reported
        if reported is None:
            raise StoppedError(killed, "continue with --resume")
        console.error(f"{killed}; continue with --resume")
        return reported


def _program() -> list[str]:
    """Python's arguments for this program: bertkit, or a user's script that adds to it (docs/add-an-objective.md)."""
    is_script = sys.modules["__main__"].__spec__ is None and sys.argv[0].endswith(".py")
    return [sys.argv[0]] if is_script else ["-m", "bertkit"]


def _end_of(failed: Any) -> tuple[int, str | None]:
    """The exit code of the rank that failed first, and what killed it; that of a stopped run if it was killed."""
    rank, failure = failed.get_first_failure()
    if failure.exitcode >= 0:
        return int(failure.exitcode), None
    number = -failure.exitcode
    with suppress(ValueError):
        number = signal.Signals(number).name
    return StoppedError.exit_code, f"rank {rank} (process {failure.pid}) was killed by {number}"
