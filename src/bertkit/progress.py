"""The interface of progress displays.

Not from a paper. No layer below the command line depends on terminals: the command line passes a display, tests pass a
silent one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

Item = TypeVar("Item")


class ProgressMeter(Protocol):
    """The progress of one piece of work."""

    def update(self, completed: int, note: str | None = None) -> None:
        """Set the total number of completed units; `note` is a short text next to the bar."""


class Progress(Protocol):
    """Opens a display for a task, of which `start` units were finished earlier: they do not count in its speed."""

    def __call__(
        self, label: str, total: int | None = None, unit: str = "steps", start: int = 0
    ) -> AbstractContextManager[ProgressMeter]: ...


class _Silence:
    def update(self, completed: int, note: str | None = None) -> None:
        return


@contextmanager
def silent_progress(
    label: str, total: int | None = None, unit: str = "steps", start: int = 0
) -> Iterator[ProgressMeter]:
    """A display that shows nothing."""
    yield _Silence()


def with_total(progress: Progress, known: int | None) -> Progress:
    """A display that takes this total for work whose size is not known where it is done."""

    def sized(
        label: str, total: int | None = None, unit: str = "steps", start: int = 0
    ) -> AbstractContextManager[ProgressMeter]:
        return progress(label, known if total is None else total, unit, start)

    return sized


def counted(items: Collection[Item], progress: Progress, label: str, *, unit: str) -> Iterator[Item]:
    """The items; each is counted on a display once the next one is requested."""
    with progress(label, total=len(items), unit=unit) as meter:
        for done, item in enumerate(items, start=1):
            yield item
            meter.update(done)
