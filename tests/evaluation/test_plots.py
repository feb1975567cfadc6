"""Figures of probes: equal figures are equal files, and lines differ by more than their shade."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bertkit.evaluation.plots import heat_map, layer_ticks, lines, new_figure, plain
from bertkit.run import figure_files
from bertkit.run.figure_files import save, svg_of

pytestmark = pytest.mark.usefixtures("drawn_figures")


def draw(directory: Path) -> list[Path]:
    figure, (left, right) = new_figure("tiny: a measure (n = 7 words)", panels=2)
    lines(left, range(3), {"one": [0.1, 0.2, None], "two": [0.3, 0.2, 0.1], "three": [0, 0, 0], "four": [1, 1, 1]})
    plain(left, x="layer", y="cosine")
    layer_ticks(left, 3)
    heat_map(right, np.array([[0.0, 0.25], [1.0, -0.5]]), rows=["a", "b"], columns=["c", "d"], low=-1)
    return save(figure, directory / "figures" / "measure")


def test_the_same_figure_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = draw(tmp_path / "one"), draw(tmp_path / "two")
    assert [path.name for path in first] == ["measure.svg", "measure.png"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_characters_without_a_glyph_are_told_in_one_line(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figure_files, "_add_fonts", lambda *_: False)  # whatever this machine has
    figure, axes = new_figure("語, 子")
    heat_map(axes, np.eye(2), rows=["子", "b"], columns=["語", "d"])
    paths = save(figure, tmp_path / "confusion")
    assert "子" in paths[0].read_text(encoding="utf-8")
    (record,) = caplog.records
    assert "confusion.png: the font has no 子語 and shows boxes there; confusion.svg" in record.getMessage()
    assert not recwarn.list


def test_lines_differ_by_marker_and_dash_not_by_colour_alone() -> None:
    _, axes = new_figure("x")
    lines(axes, range(2), {str(n): [n, n] for n in range(7)})
    looks = {(line.get_linestyle(), line.get_marker()) for line in axes.get_lines()}
    assert len(looks) >= 6
    assert len({line.get_marker() for line in axes.get_lines()}) == 7
    assert all(line.get_color() in ("black", "0.35", "0.55") for line in axes.get_lines())


def test_a_small_map_says_its_numbers_on_a_legible_ground() -> None:
    _, axes = new_figure("x")
    heat_map(axes, np.array([[0.05, 0.95], [1.0, 0.5]]), rows=["a", "b"], columns=["c", "d"])
    assert [(text.get_text(), text.get_color()) for text in axes.texts] == [
        (".05", "black"), (".95", "white"), ("1.00", "white"), (".50", "black"),
    ]  # fmt: skip
    _, large = new_figure("x")
    heat_map(large, np.zeros((30, 30)), rows=["r"] * 30, columns=["c"] * 30)
    assert not large.texts


def test_dollars_in_names_are_dollars_and_powers_on_logarithmic_axes_are_drawn() -> None:
    figure, axes = new_figure("under $10 & over $5, $$ and b$^$c")
    lines(axes, [1.0, 10.0, 1000.0], {"$x_1$": [1, 2, 3], "$$$": [3, 2, 1]})
    plain(axes, x="$", y="$^$")
    axes.set_xscale("log")
    axes.set_yticks([1, 2], ["$a$", "$_$"])
    drawn = svg_of(figure).decode()
    for name in ("under $10 &amp; over $5, $$ and b$^$c", "$x_1$", "$$$", "$^$", "$a$", "$_$"):
        assert f">{name}</text>" in drawn
    assert "mathdefault" not in drawn.replace("<!--", "").split("<defs>")[-1].replace("$\\mathdefault", "")
