"""The executors by the names that settings have for them.

Own design. Ray is imported by its executor alone, once it is chosen.
"""

from __future__ import annotations

from typing import Any

from bertkit.jobs.executor import Executor
from bertkit.jobs.local import LocalExecutor
from bertkit.jobs.ray_cluster import RayExecutor
from bertkit.jobs.settings import ExecutorSettings


def executor_of(settings: ExecutorSettings, *, fresh_process: bool = True) -> Executor[Any]:
    """The executor that settings name.

    Args:
        settings: which, and how many jobs at a time.
        fresh_process: each job in a process of its own; else a process does many short jobs.

    Raises:
        UsageError: Ray is not installed.
        DataError: its cluster is out of reach.
    """
    if settings.executor == "ray":
        return RayExecutor(settings.jobs, fresh_process=fresh_process)
    return LocalExecutor(settings.jobs, fresh_process=fresh_process)
