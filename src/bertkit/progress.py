"""The interface of progress displays.

Own design: no layer below the command line knows of terminals; it passes in a display, tests a silent one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class ProgressMeter(Protocol):
    """A task on display."""

    def update(self, completed: int, note: str | None = None) -> None:
        """So many units are done in all; `note` is a short text beside the bar."""


class Progress(Protocol):
    """Opens a display for a task."""

    def __call__(
        self, label: str, total: int | None = None, unit: str = "steps"
    ) -> AbstractContextManager[ProgressMeter]: ...


class _Silence:
    def update(self, completed: int, note: str | None = None) -> None:
        return


@contextmanager
def silent_progress(label: str, total: int | None = None, unit: str = "steps") -> Iterator[ProgressMeter]:
    """A display that shows nothing."""
    yield _Silence()


def counted(items: Collection[Item], progress: Progress, label: str, *, unit: str) -> Iterator[Item]:
    """The items, each counted on a display when the next one is requested."""
    with progress(label, total=len(items), unit=unit) as meter:
        for done, item in enumerate(items, start=1):
            yield item
            meter.update(done)
