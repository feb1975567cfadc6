"""Which executor runs the independent jobs of a command, and how many at a time.

Not from a paper. Imports nothing heavy, because command-line options are generated from it.
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
        description="Where independent jobs run (seeds, settings and tasks of a suite, runs of a study, blocks of a"
        " corpus): in processes of this machine, or on a Ray cluster (needs the extra `ray`; RAY_ADDRESS names the"
        " cluster).",
    )
    jobs: int = Field(
        1,
        ge=1,
        le=MOST_JOBS,
        description="Number of independent jobs to run at a time, each in its own process; they share the cores"
        " (default: 1).",
    )

    @property
    def is_parallel(self) -> bool:
        """Whether runs are moved out of this process."""
        return self.executor != "local" or self.jobs > 1
