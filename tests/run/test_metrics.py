"""The metrics stream: no duplicate figure after any resume, no line lost to a kill, damage located by line.

Properties of bertkit.run.metrics.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import DataError
from bertkit.run import metrics
from bertkit.run.metrics import MetricsLog, last_metrics, metrics_errors, read_metrics


def figures(step: int) -> dict[str, float]:
    return {"tokens": step * 64, "loss": 1.0 / (step + 1), "lr": 1e-4}


@given(
    total=st.integers(1, 12),
    stops=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 40)), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_resumed_however_often_the_file_equals_the_one_never_stopped(
    tmp_path_factory: pytest.TempPathFactory, total: int, stops: list[tuple[int, int, int]]
) -> None:
    """Each stop reaches a step, truncates its last line by some bytes, and is resumed from an earlier checkpoint."""
    straight, path = (tmp_path_factory.mktemp("metrics") / "metrics.jsonl" for _ in range(2))
    with MetricsLog(straight) as metrics:
        for step in range(1, total + 1):
            metrics.log(step, figures(step))
    start = 0
    for reached, back, torn in stops:
        reached = max(min(reached, total), start)
        with MetricsLog(path, start_step=start) as metrics:
            for step in range(start + 1, reached + 1):
                metrics.log(step, figures(step))
        # Lines in a checkpoint were logged and synced before it; only later ones can be torn.
        start = max(start, reached - 1 - back)
        kept = sum(len(line) + 1 for line in straight.read_text().splitlines()[:start])
        os.truncate(path, max(path.stat().st_size - torn, kept))
    with MetricsLog(path, start_step=start) as metrics:
        for step in range(start + 1, total + 1):
            metrics.log(step, figures(step))
    assert path.read_bytes() == straight.read_bytes()
    assert metrics_errors(path) == []


def test_a_start_from_nothing_drops_step_zero_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        with MetricsLog(path) as metrics:
            metrics.log(0, {"held_out_loss": 9.0})
    assert list(read_metrics(path)) == [{"step": 0, "held_out_loss": 9.0}]


def test_kill_9_loses_no_logged_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path; from bertkit.run.metrics import MetricsLog\n"
        "log = MetricsLog(Path(sys.argv[1]))\n"
        "for step in range(1, 101): log.log(step, {'loss': 0.5})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -signal.SIGKILL
    assert [value["step"] for value in read_metrics(path)] == list(range(1, 101))


def test_every_line_is_strict_json_even_where_training_diverged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as metrics:
        metrics.log(1, {"loss": float("nan"), "grad_norm": float("inf"), "note": "é"})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "note": "é",
    }


def test_a_step_may_be_logged_in_parts_but_no_figure_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n{"step": 1, "tokens": 5, "held_out_loss": 3}\n{"step": 2, "loss": 1}\n')
    assert metrics_errors(path) == []
    with path.open("a") as file:
        file.write('{"step": 2, "lr": 1}\n{"step": 2, "loss": 1}\n{"step": 1, "x": 1}\nnoise\n{"step": "3"}\n{"st')
    found = metrics_errors(path)
    assert [fault.split(": ")[0].rsplit(" ", 1)[1] for fault in found] == ["5", "6", "7", "8"]
    assert "loss a second time" in found[0]


def test_a_foreign_line_is_an_error_by_number_and_a_torn_last_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert list(read_metrics(path)) == [{"step": 1}]
    assert last_metrics(path) == {"step": 1}
    path.write_text('{"step": 1}\nnoise\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        list(read_metrics(path))


def test_a_damaged_line_is_told_of_when_a_resume_drops_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\x00\x00\x00\n{"step": 3}\n')
    MetricsLog(path, start_step=3).close()
    assert path.read_text() == '{"step": 1}\n'
    assert "line 2" in caplog.text


def test_no_file_is_no_metrics(tmp_path: Path) -> None:
    assert list(read_metrics(tmp_path / "none")) == []
    assert last_metrics(tmp_path / "none") is None


def test_the_newest_object_of_a_long_file_is_found_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "pad": "{"x" * 90}"}}\n' for step in range(2000)))
    newest = last_metrics(path)
    assert newest is not None
    assert newest["step"] == 1999


@pytest.mark.parametrize("kept", [4, 0])
def test_tensorboard_shows_every_number_once_after_a_resume(tmp_path: Path, kept: int) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path, events = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    for attempt, (start, end) in enumerate(((0, 6), (kept, 8))):
        if attempt:
            time.sleep(1.1)  # event files are read in the order of their names, which contain the second
        with MetricsLog(path, events, start_step=start) as metrics:
            for step in range(start + 1, end + 1):
                metrics.log(step, {"loss/masked_lm": float(step + 40 * attempt), "note": "text", "flag": True})
            metrics.sync()
    accumulator = EventAccumulator(str(events)).Reload()
    assert accumulator.Tags()["scalars"] == ["loss/masked_lm"]
    shown = [(event.step, event.value) for event in accumulator.Scalars("loss/masked_lm")]
    assert shown == [(step, float(step if step <= kept else step + 40)) for step in range(1, 9)]
    assert [value["step"] for value in read_metrics(path)] == list(range(1, 9))


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_events_that_cannot_be_written_are_an_error_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.excepthook
    metrics._leave_errors_to_the_command.cache_clear()
    monkeypatch.setattr(threading, "excepthook", before)  # put back at the end
    events = tmp_path / "events"
    log = MetricsLog(tmp_path / "metrics.jsonl", events)
    log.log(1, {"loss": 2.0})
    log.sync()
    shutil.rmtree(events)
    events.write_text("in the way")
    log.log(2, {"loss": 1.5})
    with pytest.raises(OSError, match="events"):
        log.sync()
    with suppress(OSError):
        log.close()
    assert [each["step"] for each in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
