"""Runs that stop at a given step, without a signal or a clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bertkit.training import trainer as loop
from bertkit.training.interrupt import StopRequest


class _StopAt(StopRequest):
    """A stop after this many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(None)
        self.left = steps

    @property
    def reason(self) -> str | None:
        self.left -= 1
        return "the test" if self.left <= 0 else None


class _SignalledTooLate(StopRequest):
    """A signal that arrives during the last update, when the loop has no further step to stop before."""

    reason = None
    signal = "SIGTERM"


@contextmanager
def signalled_behind_the_last_step() -> Iterator[None]:
    """Every run inside gets a signal after all its updates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "StopRequest", _SignalledTooLate)
        yield


@contextmanager
def stopping_at(updates: int) -> Iterator[None]:
    """Every run inside stops after this many updates since it was started or resumed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "StopRequest", lambda max_minutes=None: _StopAt(updates))
        yield
