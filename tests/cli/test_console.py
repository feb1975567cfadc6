"""Messages in a log file: untruncated tables, sparse progress lines, rounded durations."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bertkit.cli import console as console_module
from bertkit.cli.console import Console, duration, speed


@pytest.fixture
def opened(capsys: pytest.CaptureFixture[str]) -> Iterator[Console]:
    console = Console()
    console.open()
    yield console
    console.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3599.6, "1 h 0 min"), (7384, "2 h 3 min"), (90061, "1 d 1 h")],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_table_in_a_log_is_aligned_and_never_cut(opened: Console, capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 200
    opened.table(["name", "loss"], [["a", 1.5], [long, None], ["b", 10.25]][::2], title="Runs")
    opened.table(["path"], [[long]])
    assert capsys.readouterr().err == f"Runs\nname   loss\na       1.5\nb     10.25\npath\n{long}\n"


def test_wide_and_combining_characters_are_aligned(opened: Console, capsys: pytest.CaptureFixture[str]) -> None:
    opened.table(["class", "f1"], [["子供", 0.5], ["e\u0301te", 0.25], ["abcd", 1.0]])
    assert capsys.readouterr().err == "class    f1\n子供    0.5\ne\u0301te    0.25\nabcd    1.0\n"


@pytest.mark.parametrize(
    ("rate", "text"), [(0.0, "0"), (0.043, "0.043"), (0.4, "0.4"), (3.26, "3.3"), (9.97, "10"), (1234.5, "1,234")]
)
def test_a_slow_rate_is_not_rounded_to_nothing(rate: float, text: str) -> None:
    assert speed(rate) == text


def test_a_log_gets_a_progress_line_only_now_and_then(
    opened: Console, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 4)).__next__
    monkeypatch.setattr(console_module.time, "monotonic", lambda: float(clock()))
    with opened.progress("training", total=8, unit="steps") as meter:
        for done in range(1, 9):
            meter.update(done, note="loss 2.1")
    lines = capsys.readouterr().err.splitlines()
    assert 1 < len(lines) < 8
    assert lines[-1].startswith("training: 8/8 (100%) steps, ")
    assert lines[-1].endswith("loss 2.1")


def test_the_speed_of_resumed_work_is_that_of_this_process(
    opened: Console, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 10)).__next__
    monkeypatch.setattr(console_module.time, "monotonic", lambda: float(clock()))
    with opened.progress("training", total=1000, unit="steps", start=900) as meter:
        meter.update(940)
    # The clock is read when the meter is made, before a line, for the next line, and for the speed: 40 steps in 30 s.
    assert capsys.readouterr().err == "training: 940/1,000 (94%) steps, 1.3 steps/s, 45 s left\n"


def test_the_last_progress_line_is_not_written_twice(
    opened: Console, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 100)).__next__  # every update is late enough for a line
    monkeypatch.setattr(console_module.time, "monotonic", lambda: float(clock()))
    with opened.progress("dev", total=2) as meter:
        meter.update(1)
        meter.update(2)
    assert [line.partition(" (")[0] for line in capsys.readouterr().err.splitlines()] == ["dev: 1/2", "dev: 2/2"]


def test_lines_of_every_layer_are_told_and_the_logger_is_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("bertkit")
    before = (logger.level, list(logger.handlers), logger.propagate)
    console = Console()
    console.open()
    logging.getLogger("bertkit.text.sources").warning("line %d is odd", 3)
    console.close()
    assert capsys.readouterr().err == "warning: line 3 is odd\n"
    assert (logger.level, logger.handlers, logger.propagate) == before


@pytest.mark.parametrize(("no_color", "coloured"), [(None, True), ("1", False)])
def test_a_terminal_gets_colour_unless_no_color_is_set(no_color: str | None, coloured: bool) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", **({"NO_COLOR": no_color} if no_color else {})}
    code = "from bertkit.cli.console import console; console.open(); console.warn('[bold]mind[/bold] this')"
    subprocess.run([sys.executable, "-c", code], stderr=theirs, env=env, check=True)
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert "warning: [bold]mind[/bold] this" in shown
    assert ("\x1b[" in shown) is coloured


def test_a_bar_on_the_terminal_leaves_the_result_to_stdout() -> None:
    ours, theirs = pty.openpty()
    code = (
        "from bertkit.cli.console import result, console; console.open()\n"
        "with console.progress('outer', total=2) as outer, console.progress('inner', total=3):\n"
        "    result('{}')\n"
        "    outer.update(1)\n"
    )
    command = [sys.executable, "-c", code]
    env = {**os.environ, "TERM": "xterm-256color"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=env, check=True)
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert done.stdout == b"{}\n"
    assert "outer" in shown
    assert "inner" in shown


def test_a_closed_terminal_ends_neither_messages_nor_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console()
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(slave, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        console.open()
        with console.progress("training", total=8) as meter, console.progress("held-out text", total=2) as inner:
            os.close(master)
            for done in (1, 2):
                meter.update(done)
                inner.update(done)
                console.warn("the learning rate is high")
        console.stopped("stopped, checkpoint saved")
        console.close()
        terminal.write("by another writer")
        terminal.flush()
        assert os.path.samestat(os.fstat(slave), os.stat(os.devnull))
    assert (meter.completed, inner.completed) == (2, 2)


def test_a_pipe_without_a_reader_takes_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", pipe)
        console.open()
        for _ in range(2):
            console.info("x" * 10_000)
        console.close()
        pipe.write("by another writer")
        pipe.flush()
        assert os.path.samestat(os.fstat(writer), os.stat(os.devnull))
