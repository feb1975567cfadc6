"""Which executor runs the independent jobs of a command, and how many at a time.

Own design. Without anything heavy, because command-line options are generated from it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bertkit.settings import Settings

MOST_JOBS = 4096


class ExecutorSettings(Settings):
    """Where the independent jobs of a command run; never changes their results."""

    executor: Literal["local", "ray"] = Field(
        "local",
        description="What runs independent jobs (seeds, settings and tasks of a suite, runs of a study, blocks of a"
        " corpus): processes of this machine, or a Ray cluster (extra `ray`; RAY_ADDRESS names it).",
    )
    jobs: int = Field(
        1, ge=1, le=MOST_JOBS, description="Independent jobs at a time, each in a process; they share the cores."
    )

    @property
    def is_parallel(self) -> bool:
        """Whether runs leave this process."""
        return self.executor != "local" or self.jobs > 1
