"""The figures of a run show every accuracy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from bertkit.run import figure_files
from bertkit.run.metrics import MetricsLog
from bertkit.run.plots import draw_curves

pytestmark = pytest.mark.usefixtures("drawn_figures")


def test_a_run_with_many_objectives_has_a_line_for_each(tmp_path: Path) -> None:
    names = [f"objective_{letter}" for letter in "abcde"]
    with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
        for step in (1, 2):
            metrics.log(step, {"tokens": step, "loss": 1.0, **{f"held_out/accuracy/{name}": 0.5 for name in names}})
    table, drawn, _ = draw_curves(tmp_path / "metrics.jsonl", tmp_path / "figures", title="tiny")
    assert all(f"held_out/accuracy/{name}" in table.read_text() for name in names)
    assert all(f">{name}</text>" in drawn.read_text() for name in names)


def test_an_evaluation_between_two_log_lines_is_in_the_figure(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
        metrics.log(5, {"held_out/loss": 3.0})
        metrics.log(10, {"tokens": 100, "loss": 1.0})
        metrics.log(15, {"held_out/loss": 2.0})
        metrics.log(20, {"tokens": 300, "loss": 1.0})
    table, *_ = draw_curves(tmp_path / "metrics.jsonl", tmp_path / "figures", title="tiny")
    assert [line.split(",")[:2] for line in table.read_text().splitlines()[1:]] == [
        ["5", "50"],
        ["10", "100"],
        ["15", "200"],
        ["20", "300"],
    ]


def test_the_log_lines_are_converted_once_not_for_each_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[type] = []
    interp = np.interp

    def noting(step: float, steps: object, tokens: object) -> object:
        given.extend((type(steps), type(tokens)))
        return interp(step, steps, tokens)  # type: ignore[arg-type]  # as it is called

    monkeypatch.setattr(np, "interp", noting)
    with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
        metrics.log(5, {"held_out/loss": 3.0})
        metrics.log(10, {"tokens": 100, "loss": 1.0})
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "figures", title="tiny")
    assert given[:2] == [np.ndarray, np.ndarray]


def test_a_training_loss_that_was_logged_once_is_visible(tmp_path: Path) -> None:
    markers = []
    for logged in (1, 2):
        with MetricsLog(tmp_path / f"{logged}.jsonl") as metrics:
            for step in range(1, logged + 1):
                metrics.log(step, {"tokens": step, "loss": 1.0 + step, "held_out/loss": 2.0})
        _, drawn, _ = draw_curves(tmp_path / f"{logged}.jsonl", tmp_path / f"figures{logged}", title="tiny")
        markers.append(drawn.read_text().count('style="fill: #999999; stroke: #999999'))
    assert markers == [2, 0]  # the point and the legend's; a line has none


def test_a_name_in_any_language_is_in_the_figure_without_a_warning_of_the_library(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figure_files, "_add_fonts", lambda *_: False)  # whatever this machine has
    with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
        metrics.log(1, {"tokens": 1, "loss": 1.0})
    _, drawn, image = draw_curves(tmp_path / "metrics.jsonl", tmp_path / "figures", title="日本語 for $5")
    assert ">日本語 for $5</text>" in drawn.read_text(encoding="utf-8")
    (record,) = caplog.records
    assert f"{image}: the font has no 日本語 and shows boxes there; curves.svg is complete" in record.getMessage()
    assert not recwarn.list


def test_characters_that_the_usual_font_lacks_are_drawn_in_one_that_has_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    figure = Figure()
    title, plain = figure.suptitle("\u02ef and a"), figure.supxlabel("a")
    figure_files.save(figure, tmp_path / "figure")
    assert not caplog.records
    assert not recwarn.list
    assert title.get_fontfamily()[0] == plain.get_fontfamily()[0]
    assert [len(text.get_fontfamily()) for text in (title, plain)] == [2, 1]
