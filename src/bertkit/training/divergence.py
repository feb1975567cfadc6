"""Handling of divergence: the record of events, rolling back to a checkpoint, and the guard against spikes.

Not from a paper. Published large runs rolled back with a lower learning rate and watched for spikes by hand (Chowdhery
et al. 2022, PaLM, arXiv:2204.02311, section 5.1; Zhang et al. 2022, OPT, arXiv:2205.01068, section 2.5). Here each
event is recorded in the run's directory before it takes effect, so that a resumed run repeats the same events and its
result is bit-identical. Sibling saved_batch.py saves the batch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from bertkit.errors import DataError
from bertkit.files import finite, open_to_write
from bertkit.json_input import parse_json
from bertkit.settings import Settings

DIVERGENCE_FILE = "divergence.jsonl"
"""One line per skipped update, spike and roll-back; a run without any has no such file."""

SKIPPED, SPIKE, ROLLED_BACK = "skipped", "spike", "rolled_back"


class RollBack(Settings):
    """If loss or gradient stay non-finite, continue from the last checkpoint with a lower learning rate."""

    at_most: int = Field(
        3, ge=1, le=1000, description="Maximum number of times in a run; after that it ends with exit code 4."
    )
    rate_factor: float = Field(0.5, gt=0, lt=1, description="Factor applied to the learning rate each time.")


class SpikeGuard(Settings):
    """Watch for updates whose loss is far above its running mean."""

    deviations: float = Field(
        6.0, gt=0, le=1e6, description="Number of standard deviations above the mean that counts as a spike."
    )
    window_steps: int = Field(
        100, ge=2, le=1_000_000, description="Number of updates in the running mean; the first ones are not judged."
    )
    response: Literal["warn", "roll_back"] = Field(
        "warn", description="warn, or roll_back as set by optimisation.roll_back; once that is used up, warn."
    )


class RolledBackError(Exception):
    """The run continues from an earlier checkpoint, with a new trainer."""


class DivergenceRecord:
    """The events of a run, in order.

        {"step": 12, "event": "skipped", "loss": null, "grad_norm": null}
        {"step": 14, "event": "rolled_back", "to": 10, "rate_factor": 0.5, "reason": "..."}
        {"step": 30, "event": "spike", "loss": 9.1, "mean": 4.2, "deviation": 0.3}

    Args:
        path: of the record; created with the first event. An incomplete last line left by a kill is removed.

    Attributes:
        events: all events.
        rolled_back: the roll-backs among them.

    Raises:
        DataError: a line is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        events, whole = _read(path)
        if path.exists() and whole < path.stat().st_size:
            os.truncate(path, whole)
        self.events: list[dict[str, Any]] = []
        self.rolled_back: list[dict[str, Any]] = []
        self._since_roll_back: set[tuple[str, int]] = set()
        for event in events:
            self._take(event)

    def forget(self) -> None:
        """Drop all events in memory; the file is unchanged."""
        self.events.clear()
        self.rolled_back.clear()
        self._since_roll_back.clear()

    def has(self, event: str, step: int) -> bool:
        """Whether this event has been recorded for this update since the last roll-back."""
        return (event, step) in self._since_roll_back

    def rate_factor(self, step: int) -> float:
        """The factor of the learning rate of update number `step`, counted from 0."""
        factor = 1.0
        for event in self.rolled_back:
            if event["to"] <= step:
                factor = event["rate_factor"]
        return factor

    def goes_back(self, state: Mapping[str, Any]) -> int | None:
        """The step to go back to, for a checkpoint written before the last roll-back; None for other checkpoints."""
        found = self.rolled_back
        if len(found) <= int(state.get("rolled_back", 0)) or int(state["step"]) <= found[-1]["to"]:
            return None
        return int(found[-1]["to"])

    def add(self, step: int, event: str, **details: Any) -> None:
        """Record an event durably; does nothing for an event that is repeated after a resume."""
        if self.has(event, step):
            return
        entry = {"step": step, "event": event, **finite(details)}
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n"
        with open_to_write(self._path, "ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self._take(entry)

    def _take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["event"] == ROLLED_BACK:
            self.rolled_back.append(event)
            self._since_roll_back.clear()
        else:
            self._since_roll_back.add((event["event"], event["step"]))


def read_roll_backs(path: Path) -> list[dict[str, Any]]:
    """The roll-backs in a record, which another process may be writing; none if the file is missing.

    Raises:
        DataError: a line is damaged.
    """
    return [event for event in _read(path)[0] if event["event"] == ROLLED_BACK]


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The events of a record, and the number of bytes in complete lines."""
    contents = path.read_bytes() if path.exists() else b""
    whole = contents.rfind(b"\n") + 1
    events = []
    for number, line in enumerate(contents[:whole].splitlines(), start=1):
        event = parse_json(line, f"{path}, line {number}")
        if not _is_event(event):
            raise DataError(f"{path}, line {number}: not an event of a run; restore the file from a copy")
        events.append(event)
    return events, whole


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict) or type(event.get("step")) is not int or not isinstance(event.get("event"), str):
        return False
    if event["event"] != ROLLED_BACK:
        return True
    factor = event.get("rate_factor")
    return type(event.get("to")) is int and isinstance(factor, float) and 0 < factor <= 1


class RunningLoss:
    """Mean and deviation of the loss over about the last `window_steps` updates, as an exponential average.

    A loss beyond the bound counts as the bound, so that one spike neither hides the next nor becomes normal.
    """

    def __init__(self, settings: SpikeGuard) -> None:
        self.settings = settings
        self.count = 0
        self.mean = self.variance = 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)

    def is_spike(self, loss: float) -> bool:
        """Whether a loss is a spike, judged before it is added."""
        return self.count >= self.settings.window_steps and loss > self._bound

    @property
    def _bound(self) -> float:
        return self.mean + self.settings.deviations * self.deviation

    def add(self, loss: float) -> None:
        """Add the loss of an update."""
        if self.is_spike(loss):
            loss = self._bound
        self.count += 1
        share = max(1 / self.count, 1 / self.settings.window_steps)  # a plain mean until the window is full
        difference = loss - self.mean
        self.mean += share * difference
        self.variance = (1 - share) * (self.variance + share * difference * difference)

    def state(self) -> list[float]:
        """The state for a checkpoint."""
        return [self.count, self.mean, self.variance]

    def restore(self, state: list[float]) -> None:
        """Continue from a checkpoint's state."""
        self.count, self.mean, self.variance = int(state[0]), float(state[1]), float(state[2])
