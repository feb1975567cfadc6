"""The executors by their names in the settings.

Not from a paper. Ray is imported only by its executor, when it is chosen.
"""

from __future__ import annotations

from typing import Any

from bertkit.jobs.executor import Executor
from bertkit.jobs.local import LocalExecutor
from bertkit.jobs.ray_cluster import RayExecutor
from bertkit.jobs.settings import ExecutorSettings


def executor_of(settings: ExecutorSettings, *, fresh_process: bool = True) -> Executor[Any]:
    """The executor that the settings name.

    Args:
        settings: which executor, and how many jobs at a time.
        fresh_process: run each job in its own process; else a process runs many short jobs.

    Raises:
        UsageError: Ray is not installed.
        DataError: its cluster cannot be reached.
    """
    if settings.executor == "ray":
        return RayExecutor(settings.jobs, fresh_process=fresh_process)
    return LocalExecutor(settings.jobs, fresh_process=fresh_process)
