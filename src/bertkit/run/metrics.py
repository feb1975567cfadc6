"""The metrics stream: one JSON object per logged step in metrics.jsonl, and the same as TensorBoard events.

Not from a paper (contract: the run directory). A killed run leaves at most one incomplete line, which is dropped. A
resumed run first drops all lines after its checkpoint, so no figure appears twice. torch is imported for events only.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bertkit.errors import DataError
from bertkit.files import finite, naming
from bertkit.json_input import parse_json

METRICS_FILE = "metrics.jsonl"
TRACKERS_FILE = "trackers.json"
"""The ids of a run at experiment trackers, see trackers.py."""
MACHINE_FIGURES = frozenset({"tokens_per_s", "target_tokens_per_s", "mfu", "input_stall", "peak_memory_mb"})
"""Figures of speed and memory, which differ between repeats; all others are the same for the same run."""
LogNumbers = Callable[[int, Mapping[str, Any]], None]
"""Called with a step and its values, by name."""
_TAIL_BYTES = 1 << 16

log = logging.getLogger(__name__)


class MetricsLog:
    """Appends to metrics.jsonl, and to TensorBoard event files in the directory `tensorboard`.

    Each line reaches the operating system before `log` returns, so a kill loses none.

    Args:
        path: the metrics.jsonl; made if missing.
        tensorboard: directory of the event files; None: no events are written.
        trackers: called with the values of each line.
        start_step: the step resumed from; lines of later steps are dropped. 0 for a new run: all lines are dropped.
    """

    def __init__(
        self, path: Path, tensorboard: Path | None = None, trackers: Sequence[LogNumbers] = (), *, start_step: int = 0
    ) -> None:
        _drop_after(path, start_step)
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._events = None if tensorboard is None else _open_events(tensorboard, start_step)
        self._trackers = trackers

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append `{"step": step, **values}`; numbers are also written to TensorBoard. NaN and infinity become null.

        A step may be logged in parts (the loss, later the held-out loss), each figure once; steps never decrease.

        Raises:
            OSError: the disk is full or failing.
        """
        line = json.dumps(finite({"step": step, **values}), ensure_ascii=False, allow_nan=False) + "\n"
        with naming(self._path):
            _write_all(self._file, line.encode())
        if self._events is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._events.add_scalar(name, value, step)
        for tracker in self._trackers:
            tracker(step, values)

    def sync(self) -> None:
        """Force the lines to disk; called before a checkpoint, so that no figure of an earlier step is lost."""
        with naming(self._path):
            os.fsync(self._file)
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The logged objects in order; none if the file is missing. An incomplete last line is skipped.

    Raises:
        DataError: a line is not an object with a step (except an incomplete last one); names file and line.
    """
    for number, line, value in _lines(path):
        if value is None:
            if not line.endswith(b"\n"):
                return
            raise DataError(
                f"{path}, line {number}: expected a JSON object with an integer `step`, found {line[:60]!r}"
            )
        yield value


def metrics_by_step(path: Path) -> list[dict[str, Any]]:
    """One object per step, in order; a step's figures may be on several lines.

    Raises:
        DataError: see `read_metrics`.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in read_metrics(path):
        steps.setdefault(line["step"], {}).update(line)
    return [steps[step] for step in sorted(steps)]


def last_metrics(path: Path) -> dict[str, Any] | None:
    """The newest logged object, read from the end of the file; None if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return None
    return next((value for line in reversed(lines) if (value := _parse(line)) is not None), None)


def metrics_errors(path: Path) -> list[str]:
    """What is wrong with a metrics.jsonl: an unreadable line, a decreasing step, a figure logged twice."""
    errors: list[str] = []
    newest, logged = 0, set[str]()
    for number, line, value in _lines(path):
        if value is None:
            if line.endswith(b"\n"):
                errors.append(f"{path}, line {number}: not a JSON object with an integer `step`")
            continue
        step, names = value["step"], value.keys() - {"step", "tokens"}
        if step < newest:
            errors.append(f"{path}, line {number}: step {step} after step {newest}")
        elif step == newest and (twice := names & logged):
            errors.append(f"{path}, line {number}: step {step} logs {', '.join(sorted(twice))} a second time")
        logged = names | (logged if step == newest else set())
        newest = max(newest, step)
    return errors


def _lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Line number, line, and the object in it, or None if the line is incomplete or not of this format."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line, _parse(line)
    except FileNotFoundError:
        return


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        value = parse_json(line, "")
    except DataError:
        return None
    return value if isinstance(value, dict) and type(value.get("step")) is int else None


def _drop_after(path: Path, step: int) -> None:
    """Cut the file before the first line that is incomplete, not of this format, or of a later step."""
    keep = 0
    for number, line, value in _lines(path):
        if value is None and line.endswith(b"\n"):
            log.warning("%s, line %d is damaged; it and all following lines are dropped", path, number)
        if value is None or value["step"] > step or step == 0:
            break
        keep += len(line)
    if path.exists() and path.stat().st_size > keep:
        os.truncate(path, keep)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _open_events(directory: Path, start_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    _leave_errors_to_the_command()
    # TensorBoard itself hides the points of a killed attempt from purge_step onwards.
    continues = directory.is_dir() and any(directory.iterdir())
    first_step = start_step + 1 if start_step else 0
    return SummaryWriter(str(directory), purge_step=first_step if continues else None)


@cache
def _leave_errors_to_the_command() -> None:
    """Print no traceback of TensorBoard's own thread: the next flush raises its write errors again."""
    before = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if not type(failure.thread).__module__.startswith("tensorboard."):
            before(failure)

    threading.excepthook = hook
