"""The two streams of a command: progress and logs on stderr, the result on stdout.

Messages use Python's logging under the name `bertkit`, so a line logged by any layer is both shown here and kept in the
run's log.txt.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast
from unicodedata import combining, east_asian_width

from bertkit.errors import UsageError
from bertkit.files import naming
from bertkit.visible import visible, visible_columns, visible_document, visible_json, visible_lines

if TYPE_CHECKING:
    import rich.console
    import rich.progress

PLAIN_LINE_SECONDS = 10.0
"""If stderr is not a terminal, a progress line is printed at most this often."""

logger = logging.getLogger("bertkit")


class ClosedOutputError(Exception):
    """The reader of stdout, such as `| head`, has closed it."""


class Meter:
    """The progress of one piece of work; made by `Console.progress`."""

    def __init__(self, console: Console, label: str, total: int | None, unit: str, start: int) -> None:
        self._console, self._label, self._total, self._unit, self._start = console, label, total, unit, start
        self._started = self._printed = time.monotonic()
        self._shown: int | None = None
        self._bar: rich.progress.Progress | None = None
        self.completed = start
        self.note = ""

    def update(self, completed: int, note: str | None = None) -> None:
        """Set the total number of finished units; `note` is a short text shown next to the bar, such as the loss."""
        self.completed = completed
        self.note = self.note if note is None else visible(note)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=completed, note=self.note)
        elif time.monotonic() - self._printed >= PLAIN_LINE_SECONDS:
            self._printed = time.monotonic()
            self._shown = completed
            self._console.line(self.text())

    def text(self) -> str:
        """One plain line: units done, speed, time left."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        units_per_second = max(self.completed - self._start, 0) / seconds
        done = f"{self.completed:,}"
        if self._total:
            done += f"/{self._total:,} ({self.completed / self._total:.0%})"
        parts = [f"{self._label}: {done} {self._unit}", f"{speed(units_per_second)} {self._unit}/s"]
        if self._total and units_per_second > 0:
            parts.append(f"{duration(max(self._total - self.completed, 0) / units_per_second)} left")
        return ", ".join([*parts, self.note] if self.note else parts)


class Console:
    """Messages, tables and progress, on stderr.

    `verbosity` is -1 with -q (warnings and errors only), 0 by default, 1 and more with -v (debug lines too). Without a
    terminal on stderr there are no bars or colours; NO_COLOR is honoured.
    """

    def __init__(self) -> None:
        self.log_file: Path | None = None
        self.has_result = False
        """Whether part of the command's result was written to stdout."""
        self._verbosity = 0
        self._speaker = ""
        self._level_before = logger.level
        self._stream: _DiscardingStream | None = None
        self._rich: rich.console.Console | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether stderr is a terminal; only then are bars and colours shown."""
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    @property
    def stream(self) -> TextIO:
        """stderr, also below a bar of rich, which replaces `sys.stderr` while it is shown."""
        now = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        if self._stream is None or self._stream.stream is not now:
            self._stream = _DiscardingStream(now)
        return cast("TextIO", self._stream)

    @property
    def rich(self) -> rich.console.Console:
        """The rich console on stderr, made at its first use (rich takes a tenth of a second to import)."""
        if self._rich is None or self._rich.file is not self.stream:
            import rich.console

            is_terminal = None if self.is_terminal else False
            self._rich = rich.console.Console(file=self.stream, highlight=False, force_terminal=is_terminal)
        return self._rich

    def open(self, verbosity: int = 0) -> None:
        """Attach the logger's handler and reset the settings of an earlier command of this process."""
        self.close()
        self.log_file = None
        self.has_result = False
        self._speaker = ""
        logger.addHandler(_ConsoleHandler(self))
        self._level_before = logger.level
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # else each line appears twice if a library sets up the root logger
        self.set_verbosity(verbosity)
        if not self.is_terminal:
            quiet_library_bars()

    def close(self) -> None:
        """Restore the logger's state before `open`."""
        for handler in [h for h in logger.handlers if isinstance(h, _ConsoleHandler)]:
            logger.removeHandler(handler)
            logger.setLevel(self._level_before)
        logger.propagate = True

    def set_verbosity(self, verbosity: int) -> None:
        """Choose what is shown; a log file gets all messages."""
        self._verbosity = verbosity
        level = logging.WARNING if verbosity < 0 else logging.DEBUG if verbosity > 0 else logging.INFO
        for handler in logger.handlers:
            if isinstance(handler, _ConsoleHandler):
                handler.setLevel(level)
        if verbosity < 0:
            quiet_library_bars()

    def set_rank(self, rank: int) -> None:
        """Of several identical processes, show the first one's messages; of the others only warnings and errors, with
        their rank."""
        if rank:
            self.set_verbosity(-1)
            for handler in logger.handlers:
                if isinstance(handler, _ConsoleHandler):
                    handler.setLevel(logging.ERROR)
            self._speaker = f"rank {rank}: "
            self.has_result = True  # the first rank's

    def debug(self, text: str) -> None:
        """Shown only with -v."""
        logger.debug("%s", text)

    def info(self, text: str) -> None:
        """Shown unless -q."""
        logger.info("%s", text)

    def warn(self, text: str) -> None:
        """Shown always."""
        logger.warning("%s", text)

    def error(self, text: str) -> None:
        """Shown always; the command ends with the error's exit code."""
        logger.error("%s", text)

    def stopped(self, text: str) -> None:
        """Shown always; the command ends early, on the user's request or at a limit that the user set."""
        if not self._speaker:
            self._write(text)

    def announce(self, text: str) -> None:
        """Shown always; scripts wait for this line."""
        self._write(text)

    def line(self, text: str) -> None:
        """A line that is not logged, such as part of a progress report; shown unless -q."""
        if self._verbosity >= 0:
            self._write(text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
        """A table with text left-aligned and numbers right-aligned; shown unless -q.

        On a terminal it is drawn by rich; otherwise columns are separated by two spaces and nothing is truncated.
        """
        columns, title = [visible(name) for name in columns], None if title is None else visible(title)
        cells = [["" if cell is None else visible(f"{cell}") for cell in row] for row in rows]
        right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
        if self._verbosity < 0:
            return
        if not self.is_terminal:
            self._plain_table(columns, cells, right, title)
            return
        from rich.markup import escape
        from rich.table import Table

        drawn = Table(title=escape(title) if title else None, title_justify="left", box=None, header_style="bold")
        for name, to_right in zip(columns, right, strict=True):
            drawn.add_column(escape(name), justify="right" if to_right else "left", overflow="fold")
        for row in cells:
            drawn.add_row(*(escape(cell) for cell in row))
        self.rich.print(drawn)

    @contextmanager
    def progress(self, label: str, total: int | None = None, unit: str = "steps", start: int = 0) -> Iterator[Meter]:
        """Show the progress of a piece of work: a bar on a terminal, else a plain line from time to time."""
        label = visible(label)
        meter = Meter(self, label, total, unit, start)
        if self._verbosity < 0 or not self.is_terminal:
            yield meter
            if self._verbosity >= 0 and meter._shown is not None and meter.completed != meter._shown:
                self.line(meter.text())
            return
        from rich import progress as bars

        columns = (
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn(unit),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[note]}", markup=False),
        )
        # Anything written to stdout in the meantime is the result and must go there: rich would show it above the bar.
        with bars.Progress(*columns, console=self.rich, transient=True, redirect_stdout=False) as bar:
            bar.add_task(label, total=total, completed=start, note="")
            meter._bar = bar
            yield meter

    def _plain_table(
        self, columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool], title: str | None
    ) -> None:
        widths = [max([_width(name), *(_width(row[i]) for row in cells)]) for i, name in enumerate(columns)]
        if title:
            self._write(title)
        for row in [columns, *cells]:
            blanks = [" " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)]
            padded = [b + c if to_right else c + b for c, b, to_right in zip(row, blanks, right, strict=True)]
            self._write("  ".join(padded).rstrip())

    def _write(self, text: str, style: str | None = None) -> None:
        text = visible_lines(f"{self._speaker}{text}")
        if self.is_terminal:
            self.rich.print(text, style=style, markup=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)


def _width(text: str) -> int:
    """The columns that a text takes in a terminal: two for a wide character of East Asia, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)


class _DiscardingStream:
    """A stream whose text is discarded once it cannot be written, because its terminal was closed or the reader of its
    pipe has ended. If the same signal stops a run, this lets it save its checkpoint."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        with self._discarding():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._discarding():
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                # Also for other writers, and for what is left in the stream's buffer.
                os.dup2(nowhere.fileno(), self.stream.fileno())


class _ConsoleHandler(logging.Handler):
    """Shows log records on the console."""

    _prefix: Mapping[int, str] = {logging.WARNING: "warning: ", logging.ERROR: "error: ", logging.CRITICAL: "error: "}
    _style: Mapping[int, str] = {logging.DEBUG: "dim", logging.WARNING: "yellow", logging.ERROR: "red"}

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = self._prefix.get(record.levelno, "") + record.getMessage()
        self._console._write(text, self._style.get(record.levelno))


def quiet_library_bars() -> None:
    """Switch off the libraries' own progress bars unless the user has set the variable."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def speed(units_per_second: float) -> str:
    """A speed, rounded: 1,234, 12, 3.4, 0.05."""
    return f"{units_per_second:,.0f}" if units_per_second >= 9.95 else f"{units_per_second:.2g}"


def duration(seconds: float) -> str:
    """A duration: 8 s, 2 min 5 s, 3 h 20 min, 2 d 4 h."""
    whole = round(seconds)
    for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller_size} {smaller}"
    return f"{whole} s"


def size(count: int) -> str:
    """A number of bytes, rounded: 512 B, 1.5 kB, 24 MB, 2.5 GB."""
    scaled, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if scaled < 999.5:
            break
        scaled, unit = scaled / 1000, larger
    return f"{scaled:.0f} {unit}" if unit == "B" or scaled >= 9.95 else f"{scaled:.1f} {unit}"


def confirm(question: str, *, yes: bool) -> None:
    """Ask the user on the terminal, unless the answer was given with --yes.

    Raises:
        UsageError: there is no terminal to ask on, or the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            f"{question} add --yes (there is no terminal for a confirmation), or --dry-run to see what would be deleted"
        )
    print(f"{visible_lines(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was deleted")


def figure(value: float | None) -> str:
    """A score in a table: 0.8765, or - if there is none."""
    return "-" if value is None else f"{value:.4f}"


def percent(share: float | None) -> str:
    """A share in a table of percentages: 87.7, or - if there is none."""
    return "-" if share is None else f"{100 * share:.1f}"


def brief(value: float) -> str:
    """A number in a table: 12,345, or three digits if it is below 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def interval(bounds: Sequence[float] | None) -> str:
    """A confidence interval in a table: 0.8123 to 0.8765, or - if there is none."""
    return "-" if bounds is None else f"{figure(bounds[0])} to {figure(bounds[1])}"


def jsonable(value: Any) -> Any:
    """`value` as JSON types: paths become strings, numpy numbers Python numbers, NaN and infinity null."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and not isinstance(value, bool | int | float | str):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def result(value: object, *, as_json: bool = False, as_document: bool = False, as_columns: bool = False) -> None:
    """Write the command's result to stdout: `value` as one line of text, or as one JSON document with `as_json`.

    Terminal control characters are escaped, see `bertkit.visible`; in JSON the value is unchanged.

    Args:
        value: the result.
        as_json: as JSON.
        as_document: as text of several lines.
        as_columns: as one line of columns that tabs separate.

    Raises:
        ClosedOutputError: stdout is closed; the command can stop.
    """
    console.has_result = True
    if as_json:
        text = visible_json(json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False))
    else:
        safe = visible_document if as_document else visible_columns if as_columns else visible
        text = safe(str(value).rstrip("\n"))
    try:
        with naming(Path("standard output")):
            sys.stdout.write(text.rstrip("\n") + "\n")
            sys.stdout.flush()
    except BrokenPipeError as closed:
        raise ClosedOutputError from closed


console = Console()
"""The console of this process."""
